"""The simulator for replicas that compute texts in batches: as `simulator`, but a finish is known only once it begins.

What is sent to a replica waits in its queue; whenever the replica is free, the live system's batcher chooses what it
computes next. Service times are the batches' own, so the fleet's tables only tell what a text takes by itself.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from pliant.formats.pass_times import PassTimes
from pliant.policies.cluster.autoscaling import HIGH, LOW
from pliant.policies.encoder.admission import DeadlineError
from pliant.policies.encoder.batching import Batch, Batcher, PackedTimes, Waiting, shares
from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.service_curve import ServiceTimes
from pliant.simulation.arrivals import Arrivals
from pliant.simulation.encoder.fleet import Fleet, ResidentFleet
from pliant.simulation.encoder.outcome import Outcome
from pliant.simulation.encoder.simulator import Controller, Noise, Second, Service


class Batching(Protocol):
    """What chooses a replica's next batch: `policies.encoder.batching.Batcher`, or a baseline's."""

    def next_batch(self, now: float, waiting: Sequence[Waiting]) -> Batch: ...


class _Computing(NamedTuple):
    finish: float
    replica: int
    texts: list[Waiting]
    works: list[int]


class _Coming(NamedTuple):
    at: float
    replica: int
    text: Waiting
    work: int


class _Queue:
    """A replica's."""

    __slots__ = ("busy", "texts", "works")

    def __init__(self) -> None:
        self.texts: list[Waiting] = []
        self.works: list[int] = []
        self.busy = False

    def take(self, places: Sequence[int]) -> tuple[list[Waiting], list[int]]:
        taken = [self.texts[place] for place in places], [self.works[place] for place in places]
        for place in sorted(places, reverse=True):
            del self.texts[place], self.works[place]
        return taken


class BatchedSimulation:
    """Runs a stream of requests through a fleet whose replicas compute in batches.

    `batcher` gives what chooses the batches of a replica whose longest text has so many tokens.
    """

    def __init__(
        self,
        fleet: Fleet,
        service: Service,
        batcher: Callable[[int], Batching],
        controllers: Sequence[Controller] = (),
    ) -> None:
        self._fleet = fleet
        fleet.drained_at = self._drained_at
        self._service = service
        self._batcher = cache(batcher)
        self._controllers = controllers
        self._noise = Noise(service)
        self._computing = [_Computing(math.inf, -1, [], [])]
        """The batches that are being computed, as a heap."""
        self._unknown: list[tuple[float, int, int]] = []
        """When the dispatcher will know of what is answered, replica and work, as a heap."""
        self._coming: deque[_Coming] = deque()
        """On their way to a replica, in order."""
        self._queues: dict[int, _Queue] = {}
        self._answered: list[tuple[float, float]] = []
        """Arrival and latency of what was answered since the last count."""
        self._busy_s = 0.0
        self._counted_from = 0

    def run(self, stream: Iterable[Arrivals], warmup: int = 0) -> Outcome:
        """Serve a stream: one item for each second of it, in order; the outcome leaves out the first `warmup` items."""
        outcome = Outcome()
        self._counted_from = warmup
        for number, arrivals in enumerate(stream):
            if number == warmup:
                outcome = Outcome()
            self._second(number, arrivals, outcome)
        self._advance(math.inf)
        self._count(outcome)
        return outcome

    def _second(self, number: int, arrivals: Arrivals, outcome: Outcome) -> None:
        fleet = self._fleet
        times, tokens = arrivals.seconds.tolist(), arrivals.tokens.tolist()
        end, since, begin = number + 1.0, float(number), 0
        outcome.arrived.append(len(times))
        outcome.missed.append(0)
        outcome.requests += len(times)
        outcome.seconds += 1
        shed = 0
        while (change := fleet.next_change) < end:
            until = int(np.searchsorted(arrivals.seconds, change, "right"))
            shed += self._arrive(times[begin:until], tokens[begin:until])
            self._advance(change)
            outcome.gpu_s += fleet.running * max(0.0, change - since)
            since, begin = max(since, change), until
            fleet.settle(change)
        shed += self._arrive(times[begin:], tokens[begin:])
        self._advance(end)
        outcome.gpu_s += fleet.running * (end - since)
        outcome.shed += shed
        outcome.missed[-1] += shed
        busy_s = self._busy_s
        answered, near, above = self._count(outcome)
        if self._controllers:
            numbers = np.bincount(arrivals.tokens)
            lengths = np.flatnonzero(numbers).tolist()
            second = Second({length: int(numbers[length]) for length in lengths}, answered, near, above, shed, busy_s)
            for controller in self._controllers:
                controller.tick(end, fleet, second)
        outcome.counts.append(fleet.counts())
        outcome.running.append(fleet.running)

    def _arrive(self, times: Sequence[float], tokens: Sequence[int]) -> int:
        """Dispatch requests in order of arrival; return how many were refused."""
        dispatch, way_s = self._fleet.dispatcher.dispatch, self._service.way_s
        slo_s = self._service.slo_s - self._service.overhead_s
        budget_s = self._service.slo_s if self._service.admission else None
        shed = 0
        for time, length in zip(times, tokens, strict=True):
            self._advance(time)
            try:
                replica, _, work = dispatch(length, budget_s)
            except DeadlineError:
                shed += 1
                continue
            coming = _Coming(time + way_s, replica, Waiting(length, time, time + slo_s), work)
            if way_s:
                self._coming.append(coming)
            else:
                self._come(coming)
        return shed

    def _come(self, coming: _Coming) -> None:
        queue = self._queues.setdefault(coming.replica, _Queue())
        queue.texts.append(coming.text)
        queue.works.append(coming.work)
        if not queue.busy:
            self._begin(coming.at, coming.replica, queue)

    def _begin(self, now: float, replica: int, queue: _Queue) -> None:
        batch = self._batcher_of(replica).next_batch(now, queue.texts)
        seconds = batch.seconds * self._noise.factors(1)[0]
        self._busy_s += seconds
        queue.busy = True
        self._fleet.free_at[replica] = now + seconds
        heapq.heappush(self._computing, _Computing(now + seconds, replica, *queue.take(batch.texts)))

    def _batcher_of(self, replica: int) -> Batching:
        return self._batcher(len(self._fleet.tables[replica]) - 1)

    def _advance(self, now: float) -> None:
        """Until `now`, let what is on its way come, answer what is computed, and have the dispatcher know of it."""
        computing, coming, unknown = self._computing, self._coming, self._unknown
        complete, way_s = self._fleet.dispatcher.complete, self._service.way_s
        while True:
            if coming and coming[0].at <= now and coming[0].at < computing[0].finish:
                self._come(coming.popleft())
                continue
            if computing[0].finish > now or computing[0].replica < 0:
                break
            finish, replica, texts, works = heapq.heappop(computing)
            for text, work in zip(texts, works, strict=True):
                heapq.heappush(unknown, (finish + way_s, replica, work))
                self._answered.append((text.arrived, finish - text.arrived))
            queue = self._queues[replica]
            queue.busy = False
            if queue.texts:
                self._begin(finish, replica, queue)
        while unknown and unknown[0][0] <= now:
            complete(*heapq.heappop(unknown)[1:])

    def _count(self, outcome: Outcome) -> tuple[int, int, int]:
        """Count what was answered; return how many, and of them those near the SLO and above half of it."""
        found = np.array(self._answered).reshape(-1, 2)
        found = found[found[:, 0] >= self._counted_from]
        seconds, slo_s = found[:, 1] + self._noise.overheads(len(found)), self._service.slo_s
        outcome.latencies.add(seconds)
        in_time = seconds <= slo_s
        outcome.within_slo += int(in_time.sum())
        for arrived in found[~in_time, 0].astype(np.int64).tolist():
            outcome.missed[arrived - self._counted_from] += 1
        outcome.busy_s += self._busy_s
        self._answered, self._busy_s = [], 0.0
        return len(seconds), int((seconds >= HIGH * slo_s).sum()), int((seconds >= LOW * slo_s).sum())

    def _drained_at(self, replica: int) -> float:
        """When a replica will have answered all that it was sent, if it is sent nothing more."""
        free = self._fleet.free_at[replica]
        queue = self._queues.get(replica)
        waiting = list(queue.texts) if queue else []
        waiting += [coming.text for coming in self._coming if coming.replica == replica]
        while waiting:
            batch = self._batcher_of(replica).next_batch(free, waiting)
            there = max(waiting[place].arrived for place in batch.texts) + self._service.way_s
            free = max(free, there) + batch.seconds
            waiting = [text for place, text in enumerate(waiting) if place not in batch.texts]
        return free


class _Measured:
    """The batches of `batching`, with the seconds that `passes` has for them."""

    def __init__(self, batching: Batching, passes: PassTimes) -> None:
        self._batching = batching
        self._passes = passes

    def next_batch(self, now: float, waiting: Sequence[Waiting]) -> Batch:
        texts = self._batching.next_batch(now, waiting).texts
        return Batch(texts, self._passes.packed_s([waiting[place].length for place in texts]))


def packed_simulation(
    passes: PassTimes, homes: Iterable[int], longest: int, service: Service, controllers: Sequence[Controller] = ()
) -> BatchedSimulation:
    """Replicas with a packed runtime for up to `longest` tokens, as the live system has them, at these homes.

    What they compute next is chosen by the same estimate of `passes` as there, and takes what `passes` says.
    """
    times = PackedTimes.fitted(passes)
    alone_s = dict(zip(passes.lengths, passes.seconds[0], strict=True))
    curve = ServiceTimes(alone_s, shares(times, alone_s)).curve(0.0)
    fleet = ResidentFleet(Dispatcher(service.slo_s), homes, curve, longest)
    return BatchedSimulation(fleet, service, lambda held: _Measured(Batcher(times, held), passes), controllers)
