"""Which waiting requests run next, and which adapters come and go for them (Chameleon §4.2).

Small requests go first: each queue admits within its quota, then what memory is over goes to those beyond theirs, down
the same order (`two_phase_admission`). A request whose adapter is absent has it loaded; others pass it meanwhile, but
leave it the memory that it then needs.

The first request of a queue that is within its quota and is not admitted all the same is *booked*. If it lacks memory,
those behind it, in any queue, pass only as `bypass` has it; otherwise it goes first as soon as it can, or, if all it
lacks are slots or prompt tokens, once the queues' patience is over or nobody else gets on. The adapter of the one
booked first is not evicted. So nobody starves. Let T be the longest time from an admission to the end, as it is or as
it was predicted, L the longest time that a load takes, P the patience and C the number of queues. The first of a queue

- is within its quota after T, when all of its queue that run have ended, if it is not at once;
- goes first P later, and after those booked before it: one of each queue, and of each from before queues changed;
- has its adapter 2 L later, as one load may be under way, and its slot and its memory T after that;

altogether T + P + 2 C (T + 2 L) at the most, and the n-th of its queue n times that. Where queues are `strict`, nobody
passes and nobody is booked: the first then waits T + 2 L.

A request is charged for its answer as it was predicted. One that gets longer is `extended`, and where memory is short
one that came later makes way: the one that is computed again the soonest for the memory that it gives. It goes on
later, behind the tokens that it has, and is guessed to need twice as many, so that this happens to it seldom. Where
another is predicted to end before that could be computed again, the one that gets longer waits for it instead.

Beyond the paper: an adapter that several requests share is charged to the quota of each, but as memory it is counted
once, and what is over by that is lent in the second phase. Loans leave alone what a request within its quota waits for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Generic, NamedTuple

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.arrival_histogram import ArrivalHistogram
from pliant.policies.llm.jobs import A, Decisions, Extension, Job, K
from pliant.policies.llm.jobs import SchedulerError as SchedulerError
from pliant.policies.llm.queue_order import Queues
from pliant.policies.llm.request_state import RequestState
from pliant.policies.llm.shared_memory import Sharing
from pliant.policies.llm.two_phase_admission import Round

_HORIZON_S = 10.0
"""How far ahead it is looked for adapters that will be asked for."""
_LOOK_EVERY_S = 1.0


class ClassStats(NamedTuple):
    """One queue. What is counted is counted from the start, whatever its cut-off was then."""

    cut_off: float
    quota: int
    waiting: int
    admitted: int
    waited_s: float
    """Seconds that those admitted have waited, together."""


class SchedulerStats(NamedTuple):
    """What a scheduler has done since the start."""

    classes: list[ClassStats]
    """Small requests first."""
    squashed: int
    preempted: int
    """Requests that made way for others that came before them."""
    bypassed: int
    """Admissions past a request that waited for memory or for its adapter."""


class Scheduler(Generic[K, A]):
    """Shares `total` bytes out among the requests of `queues` and the adapters of `cache`; nobody else changes these.

    With `prefetch` adapters are loaded for requests that cannot be admitted yet, and with a `histogram` also some that
    nobody waits for yet, if they are likely to be asked for: into free memory, and in the place of adapters that nobody
    used within the cache's window. A cache that keeps nothing has no use for that. At most `loads` are under way at a
    time. `slots` are the requests that can run at a time, if there may be memory for more: quotas then are shares of
    the slots too.

    Keys name requests for as long as these wait or run. `now` is in seconds on any clock that does not run backwards.
    """

    def __init__(
        self,
        queues: Queues[K, A],
        cache: AdapterCache[A],
        total: int,
        prefetch: bool = True,
        histogram: ArrivalHistogram[A] | None = None,
        loads: int = 2,
        slots: int | None = None,
    ) -> None:
        if loads < 1:
            raise ValueError(f"loads must be at least 1, got {loads}")
        self.cache = cache
        """To be read."""
        self._state: RequestState[K, A] = RequestState(queues, cache, total, slots)
        self._queues = queues
        self._memory = self._state.memory
        self._prefetch = prefetch
        self._histogram = histogram if cache.keeps else None
        self._sizes: dict[A, int] = {}
        """Bytes of the adapters that were asked for, where there is a histogram."""
        self._look_at = 0.0
        self._loads = loads
        self._changed = True
        self._put_off = False
        self._patience_ends = math.inf
        """When somebody goes first who is booked for later."""

    def share(self, sharing: Sharing[K]) -> None:
        """Requests that run have their memory there. Before the first request."""
        self._memory.sharing = sharing

    @property
    def looks_every_s(self) -> float | None:
        """Seconds after which `schedule` looks again which adapters are likely to be asked for; None if it never does.

        To be called so often also where nobody waits or runs.
        """
        return None if self._histogram is None else _LOOK_EVERY_S

    @property
    def used(self) -> int:
        """Bytes of requests that run, and of adapters that are loading or resident."""
        return self._memory.used

    def add(self, job: Job[K, A], now: float) -> None:
        """Queue a request. Raises ValueError if there is one of that key already, or it never fits into memory."""
        state = self._state
        if job.key in state.waiting or job.key in state.running:
            raise ValueError(f"a request {job.key!r} waits or runs already")
        if self._memory.bytes(job) > self._memory.shared:
            raise ValueError(
                f"request {job.key!r} needs {job.charge} bytes, and {job.adapter_bytes} for its adapter, but only "
                f"{self._memory.shared} of {self._memory.total} bytes are not pinned"
            )
        state.enqueue(job, self._queues.add(job, now))
        if job.adapter is not None:
            self.cache.asked(job.adapter)
            if self._histogram is not None:
                self._histogram.observe(job.adapter, now)
                self._sizes[job.adapter] = job.adapter_bytes
        self._changed = True

    def cancel(self, key: K, now: float) -> None:
        """A request is given up, whether it waits or runs. Unknown ones are ignored."""
        state = self._state
        if key in state.waiting:
            state.dequeue(state.waiting[key])
        elif key in state.running:
            state.leave(state.running[key], now)
        state.squashed.pop(key, None)
        self._changed = True

    def ended(self, key: K, now: float) -> None:
        """A running request has its last token. Raises KeyError if it does not run."""
        running = self._state.running[key]
        self._state.leave(running, now)
        if self._state.squashed.pop(key, None) is None:
            self._queues.ended(running.job, now - running.since)
        self._changed = True

    def generated(self, key: K, tokens: int) -> None:
        """A running request has had so many tokens since it was added. Raises KeyError if it does not run."""
        running = self._state.running[key]
        running.tokens = tokens
        if running.passed and running.overdue:
            self._changed = True

    def extend(self, key: K, charge: int, now: float, step_s: float = math.inf) -> Extension[K, A]:
        """A running request needs `charge` bytes, as its answer gets longer than predicted; an iteration takes
        `step_s`. Raises KeyError if it does not run.

        For it go adapters that nobody uses; and then requests that came later are squashed, those first that take the
        least to compute again for what they give, and last itself. They are to be recharged. Where another is predicted
        to end before that could be computed again, it waits instead. The request that came first of those that run
        always goes on.
        """
        extension = self._state.extend(self._state.running[key], charge, now, step_s)
        self._changed = True
        return extension

    def recharge(self, key: K, charge: int) -> None:
        """A request that waits, as it was squashed, will need `charge` bytes. Raises KeyError if it does not wait."""
        self._state.recharge(self._state.waiting[key], charge)

    def loaded(self, adapter: A, now: float) -> None:
        """A load that was asked for is over, and requests may use the adapter."""
        self._memory.loaded(adapter, now)
        self._changed = True

    def load_failed(self, adapter: A) -> list[K]:
        """A load failed: the requests that wait for it do so no longer, and are returned. It is pinned no longer."""
        self._memory.load_failed(adapter)
        self._memory.unpin(adapter)
        self._sizes.pop(adapter, None)
        in_vain = [waiting for waiting in self._state.waiting.values() if waiting.job.adapter == adapter]
        for waiting in in_vain:
            self._state.dequeue(waiting)
            self._state.squashed.pop(waiting.job.key, None)
        self._changed = True
        return [waiting.job.key for waiting in in_vain]

    def pin(self, adapter: A, bytes: int) -> None:
        """Load an adapter of so many bytes, if it is absent, and never evict it.

        Raises ValueError if a request that waits would not fit any more.
        """
        most = max((self._memory.bytes(waiting.job) for waiting in self._state.waiting.values()), default=0)
        if adapter not in self._memory.pinned and bytes + most > self._memory.shared:
            raise ValueError(
                f"{adapter!r} takes {bytes} bytes and cannot be pinned: of {self._memory.total}, {self._memory.shared} "
                f"bytes are not pinned, and a request that waits needs {most} of them"
            )
        self._memory.pin(adapter, bytes)
        self._changed = True

    def schedule(self, now: float, slots: int, prompts: int, first: Collection[K] = ()) -> Decisions[K, A]:
        """What to do before the next iteration; it is counted as done.

        Of those that wait, `first` are admitted before others as far as they can be, whatever is booked; among them,
        and then among the others, the order is the queues'.

        At most `slots` requests are admitted, and no more once those admitted have `prompts` prompt tokens together, of
        which the last may thus exceed what is left. Takes next to no time if nothing has happened since the last call.
        When nothing runs and no load is under way, somebody that waits is admitted, or has its adapter loaded, unless
        `slots` or `prompts` are 0.
        """
        put_off = self._put_off and slots > 0 and prompts > 0
        look_ahead = self._histogram is not None and now >= self._look_at
        if not (self._changed or put_off or look_ahead or now >= self._patience_ends):
            return Decisions([], [], [], [])
        round: Round[K, A] = Round(self._state, now, slots, prompts, self._loads)
        round.trim()
        if self._queues.refresh(now, self._memory.shared):
            self._state.reclassify()
        round.load_pinned()
        round.admit(first)
        if self._prefetch:
            round.load_ahead()
        if self._histogram is not None and look_ahead:
            self._look_at = now + _LOOK_EVERY_S
            likely = self._histogram.likely(now, _HORIZON_S)
            round.load_likely((adapter, self._sizes[adapter]) for adapter, _ in likely if adapter in self._sizes)
        self._changed = False
        self._put_off = round.limited and bool(self._state.waiting)
        self._patience_ends = self._state.patience_ends(now)
        return round.decisions

    def waiting(self) -> list[Job[K, A]]:
        """All that wait, those first that will likely be admitted first."""
        return list(self._queues.waiting())

    def ahead(self, job: Job[K, A]) -> list[Job[K, A]]:
        """Those that wait and will likely be admitted before `job`, if that is added now."""
        return self._queues.ahead(job)

    def stats(self) -> SchedulerStats:
        """What has been done, and who waits."""
        state = self._state
        classes = [
            ClassStats(
                cut_off=lane.cut_off,
                quota=int(min(lane.quota, self._memory.shared)),
                waiting=len(lane.jobs),
                admitted=state.admitted[lane.index],
                waited_s=state.waited_s.get(lane.index, 0.0),
            )
            for lane in self._queues.lanes
        ]
        return SchedulerStats(classes, state.squashes, state.preemptions, state.bypassed)

    def check(self) -> None:
        """Raise SchedulerError, or the cache's CacheError, unless all counts agree. Slow: for tests and debugging."""
        self._state.check()
