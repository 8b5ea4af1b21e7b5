"""Simulated replicas: what they hold, when they are free, and how they start, change over and leave (Arlo §4)."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from pliant.policies.encoder.dispatch import Dispatcher, Times
from pliant.policies.encoder.service_curve import ServiceCurve

LOAD_S = 1.0
"""A replica that changes over is out of service for as long, once it is drained (§4)."""


class Dispatching(Protocol):
    """What chooses a replica for each request: `policies.encoder.dispatch.Dispatcher`, or a baseline's."""

    def assign(self, replica: int, max_length: int, curve: ServiceCurve) -> None: ...
    def suspend(self, replica: int) -> None: ...
    def remove(self, replica: int) -> None: ...
    def dispatch(self, length: int, budget_s: float | None = None) -> tuple[int, float, int]: ...
    def complete(self, replica: int, work: int) -> None: ...


class Fleet:
    """Simulated replicas, which hold runtimes, change over and leave; `dispatcher` sends them requests.

    `held` are the max_lengths of the replicas that are in service from the start. `table(max_length)` gives the seconds
    that a request takes on such a runtime, for each length from 0; where it depends on the length, `expected_s` is what
    the dispatcher and the planner reckon with.
    """

    def __init__(
        self,
        dispatcher: Dispatching,
        held: Iterable[int],
        table: Callable[[int], Sequence[float]],
        expected_s: float | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.holds: dict[int, int] = {}
        """Replica -> the max_length it holds or is changing to; not those that are starting or leaving."""
        self.starting: dict[int, int] = {}
        """Replica -> the max_length it will hold."""
        self.free_at: list[float] = []
        """By replica: when it will have answered all that it was sent, or all that it computes now, if in batches."""
        self.drained_at: Callable[[int], float] = self.free_at.__getitem__
        """When a replica will have answered all that it was sent, if it is sent nothing more."""
        self.tables: list[Sequence[float]] = []
        """By replica: seconds by length on the runtime it holds."""
        self._table = table
        self._expected_s = expected_s
        self._known: dict[int, Sequence[float]] = {}
        self._changes: list[tuple[float, int]] = []
        """When a replica is ready to serve, or to leave, and which; as a heap."""
        self._switching: set[int] = set()
        self._leaving: set[int] = set()
        self._batches: deque[Mapping[int, int]] = deque()
        for max_length in held:
            self.start(0.0, max_length)
        self.settle(0.0)

    def start(self, now: float, max_length: int, startup_s: float = 0.0) -> None:
        """Add a replica that takes requests after `startup_s` seconds."""
        replica = len(self.free_at)
        self.free_at.append(now)
        self.tables.append(())
        self.starting[replica] = max_length
        heapq.heappush(self._changes, (now + startup_s, replica))

    def stop(self, now: float, replica: int) -> None:
        """Send `replica`, which must not be changing over, nothing more; it leaves once it has answered all."""
        del self.holds[replica]
        self._leaving.add(replica)
        self.dispatcher.suspend(replica)
        heapq.heappush(self._changes, (max(now, self.drained_at(replica)), replica))

    def replace(self, now: float, batches: Iterable[Mapping[int, int]]) -> None:
        """Change replicas over to other max_lengths, one batch after another: drain, load, serve (§4)."""
        self._batches = deque(batches)
        self._next_batch(now)

    def settle(self, now: float) -> None:
        """Put into service, or let go, the replicas that are ready by `now`."""
        while self._changes and self._changes[0][0] <= now:
            _, replica = heapq.heappop(self._changes)
            if replica in self._leaving:
                self._leaving.remove(replica)
                self.dispatcher.remove(replica)
                continue
            if replica in self.starting:
                self.holds[replica] = self.starting.pop(replica)
            self._switching.discard(replica)
            self._serve(replica, self.holds[replica])
        self._next_batch(now)

    @property
    def next_change(self) -> float:
        """When `settle` has something to do; infinite when nothing changes."""
        return self._changes[0][0] if self._changes else math.inf

    @property
    def switching(self) -> frozenset[int]:
        """Replicas that drain or load in order to hold another max_length."""
        return frozenset(self._switching)

    @property
    def replacing(self) -> bool:
        """Whether a replacement is under way."""
        return bool(self._switching or self._batches)

    @property
    def running(self) -> int:
        """Replicas that occupy a GPU, whatever they do."""
        return len(self.holds) + len(self.starting) + len(self._leaving)

    def counts(self) -> dict[int, int]:
        """Replicas by the max_length that they hold or are changing to, in rising length."""
        return dict(sorted(Counter(self.holds.values()).items()))

    def table(self, max_length: int) -> Sequence[float]:
        """Seconds by length on a runtime of `max_length`."""
        if max_length not in self._known:
            self._known[max_length] = self._table(max_length)
        return self._known[max_length]

    def service_s(self, max_length: int) -> float:
        """Seconds that a request is expected to take on a runtime of `max_length`."""
        return self._expected_s or self.table(max_length)[max_length]

    def _serve(self, replica: int, max_length: int) -> None:
        """Put `replica` into service."""
        self.tables[replica] = self.table(max_length)
        self.dispatcher.assign(replica, max_length, ServiceCurve.constant(self.service_s(max_length)))

    def _next_batch(self, now: float) -> None:
        while self._batches and not self._switching:
            for replica, max_length in self._batches.popleft().items():
                if replica not in self.holds:
                    continue
                self.holds[replica] = max_length
                self._switching.add(replica)
                self.dispatcher.suspend(replica)
                heapq.heappush(self._changes, (max(now, self.drained_at(replica)) + LOAD_S, replica))


class ResidentFleet(Fleet):
    """Replicas with room for all runtimes; what `Fleet` says of the length that one holds is said here of its home.

    A new home takes effect at once. `times` says what a text of up to `longest` tokens takes.
    """

    def __init__(self, dispatcher: Dispatcher[int], homes: Iterable[int], times: Times, longest: int) -> None:
        self._times = times
        self._longest = longest
        self._seconds = times.tables(longest).expected.tolist()
        self._homed = dispatcher
        super().__init__(dispatcher, homes, lambda _: self._seconds)

    def replace(self, now: float, batches: Iterable[Mapping[int, int]]) -> None:
        for batch in batches:
            for replica, home in batch.items():
                self.holds[replica] = home
                self._serve(replica, home)

    def service_s(self, max_length: int) -> float:
        return float(self._seconds[max_length])

    def _serve(self, replica: int, max_length: int) -> None:
        self.tables[replica] = self._seconds
        self._homed.assign(replica, self._longest, self._times, home=max_length)


def static_fleet(slo_s: float, held: Iterable[int], service_s: Mapping[int, float]) -> Fleet:
    """Static runtimes behind the live system's dispatcher; `service_s` has the seconds of each max_length."""
    return Fleet(Dispatcher(slo_s), held, lambda max_length: [service_s[max_length]] * (max_length + 1))
