"""Which requests wait and which run, what they hold, and how they go from the one to the other (Chameleon §4.2).

What is decided by `two_phase_admission` is done here, so that queues, quotas, memory and cache always agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.jobs import A, Job, K, SchedulerError
from pliant.policies.llm.queue_order import Lane, Queues

K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)


@dataclass(eq=False)
class Waiting(Generic[K, A]):
    """A request that is queued."""

    job: Job[K, A]
    lane: Lane[K, A]
    first_from: float | None = None
    """When it goes before smaller ones, if it is booked."""


@dataclass(eq=False)
class Running(Generic[K, A]):
    """A request that has its memory."""

    job: Job[K, A]
    """As it was when it was queued last."""
    lane: Lane[K, A]
    """From which it has borrowed."""
    borrowed: int
    since: float
    passed: list[K]
    """Blocked requests that it was predicted to end before."""
    begun: int
    """Tokens of its answer at its admission."""
    tokens: int
    """And now."""

    @property
    def left(self) -> int:
        """Iterations until it ends, as predicted; at least 1."""
        return max(1, self.job.output - self.tokens + self.begun)

    @property
    def overdue(self) -> bool:
        """Whether it should have ended."""
        return self.tokens - self.begun >= self.job.output


class Sharing(Protocol[K_contra]):
    """Where requests that run have their memory; they may have some of it together."""

    @property
    def saved(self) -> int:
        """Bytes by which those that run need less than they are charged for, because they share."""
        ...

    def saves(self, key: K_contra) -> int:
        """Bytes that a request would share with those that run, if it began now."""
        ...

    def begin(self, key: K_contra, now: float) -> None:
        """A request runs from now on."""
        ...

    def end(self, key: K_contra, now: float) -> None:
        """A request runs no more."""
        ...


class Apart(Generic[K]):
    """Nobody shares anything."""

    saved = 0

    def saves(self, key: K) -> int:
        return 0

    def begin(self, key: K, now: float) -> None:
        return

    def end(self, key: K, now: float) -> None:
        return


class SharedMemory(Generic[K, A]):
    """`total` bytes for keys and values of live requests and for the adapters of `cache` (Chameleon §4.1).

    Adapters stay in what requests leave idle. The cache names those that may go; this counts both together, so that
    what is taken never exceeds what there is.
    """

    def __init__(self, total: int, cache: AdapterCache[A]) -> None:
        self.total = total
        self.cache = cache
        self.loading: dict[A, int] = {}
        """Bytes of the adapters whose loads are under way."""
        self.pinned: dict[A, int] = {}
        """Bytes of the adapters that stay, whether they are loaded yet or not."""
        self.users: Counter[A] = Counter()
        """Running requests by adapter."""
        self.sharing: Sharing[K] = Apart()
        self._charges = 0
        self._kept: A | None = None

    @property
    def used(self) -> int:
        """Bytes of live requests, and of adapters that are loading or resident."""
        return self._charges - self.sharing.saved + self.cache.bytes

    @property
    def free(self) -> int:
        """Bytes that are not used."""
        return self.total - self.used

    @property
    def shared(self) -> int:
        """Bytes that are not set aside for pinned adapters."""
        return self.total - sum(self.pinned.values())

    def bytes(self, job: Job[K, A]) -> int:
        """What `job` takes of `shared`: its charge, and its adapter, as though nobody else used that."""
        return job.charge + (0 if job.adapter in self.pinned else job.adapter_bytes)

    def absent(self, job: Job[K, A]) -> bool:
        """Whether an adapter must be loaded for `job`."""
        return job.adapter is not None and self.cache.state(job.adapter) == "absent"

    def evictable(self, job: Job[K, A]) -> int:
        """Bytes of adapters that could go to make room for `job`: of all idle ones but its own."""
        adapter = job.adapter
        own = adapter is not None and self._resident(adapter) and adapter not in self.users and not self.stays(adapter)
        return self.cache.idle - (job.adapter_bytes if own else 0)

    def lacking(self, job: Job[K, A]) -> int:
        """Bytes that `job` needs beyond those that can be had; it fits unless this is positive."""
        absent = job.adapter_bytes if self.absent(job) else 0
        lacking = job.charge + absent - self.free - self.evictable(job)
        return lacking - self.sharing.saves(job.key) if lacking > 0 else lacking

    def trim(self, now: float) -> list[A]:
        """Evict what the cache would not keep any longer; returns it."""
        victims = self.cache.trim(now)
        for victim in victims:
            self.cache.evict(victim, "unused")
        return victims

    def take(self, job: Job[K, A], now: float, spare_wanted: bool) -> list[A] | None:
        """`job`, for which nothing is lacking and whose adapter is resident, runs from now on.

        Returns what was evicted for it; None, and `job` does not run, if that would be adapters that are wanted, and
        `spare_wanted` says that they stay.
        """
        needed = job.charge - (self.sharing.saves(job.key) if job.charge > self.free else 0)
        evicted = self._make_room(needed, now, spare_wanted=True)
        if evicted is None and spare_wanted:
            return None
        self._charges += job.charge
        self.sharing.begin(job.key, now)
        if job.adapter is not None:
            self.users[job.adapter] += 1
            self.cache.acquire(job.adapter, now)
        return evicted if evicted is not None else self._make_room(0, now, spare_wanted=False)

    def give_back(self, job: Job[K, A], now: float) -> None:
        """`job` runs no more."""
        self._charges -= job.charge
        self.sharing.end(job.key, now)
        if job.adapter is not None:
            self.users[job.adapter] -= 1
            if not self.users[job.adapter]:
                del self.users[job.adapter]
            self.cache.release(job.adapter, now)

    def begin_load(
        self, adapter: A, bytes: int, now: float, spare_wanted: bool, spare_recent: bool = False
    ) -> list[A] | None:
        """An absent adapter takes its memory; returns what was evicted for it, None if there is no room."""
        evicted = self._make_room(bytes, now, spare_wanted, spare_recent)
        if evicted is not None:
            self.cache.begin_load(adapter, bytes, now)
            self.loading[adapter] = bytes
        return evicted

    def _make_room(self, bytes: int, now: float, spare_wanted: bool, spare_recent: bool = False) -> list[A] | None:
        """Evict what it takes to have `bytes` free; returns what was evicted, None if that is not possible."""
        victims = self.cache.victims(bytes - self.free, now, spare_wanted, spare_recent)
        for victim in victims or ():
            self.cache.evict(victim, "memory")
        return victims

    def loaded(self, adapter: A, now: float) -> None:
        """A load that was begun is over."""
        del self.loading[adapter]
        self.cache.loaded(adapter, now)

    def load_failed(self, adapter: A) -> None:
        """A load that was begun failed; its memory is free."""
        del self.loading[adapter]
        self.cache.failed(adapter)

    def pin(self, adapter: A, bytes: int) -> None:
        """Set memory aside for an adapter that is never to be evicted."""
        self.pinned[adapter] = bytes
        self.cache.pin(adapter)

    def unpin(self, adapter: A) -> None:
        """The adapter may be evicted again. Unknown ones are ignored."""
        if self.pinned.pop(adapter, None) is not None and adapter != self._kept:
            self.cache.unpin(adapter)

    def keep(self, adapter: A | None) -> None:
        """Do not evict `adapter` as long as no other is named."""
        if adapter == self._kept:
            return
        if self._kept is not None and self._kept not in self.pinned:
            self.cache.unpin(self._kept)
        if adapter is not None:
            self.cache.pin(adapter)
        self._kept = adapter

    def stays(self, adapter: A) -> bool:
        """Whether `adapter` is not to be evicted even when nobody uses it."""
        return adapter in self.pinned or adapter == self._kept

    def _resident(self, adapter: A) -> bool:
        return self.cache.state(adapter) == "resident"

    def check(self, running: Iterable[Job[K, A]]) -> None:
        """Raise SchedulerError unless the counts agree with `running`, and nothing is given out that is not there."""
        jobs = list(running)
        if self._charges != sum(job.charge for job in jobs):
            raise SchedulerError(f"{self._charges} bytes are charged, but {len(jobs)} requests run")
        if self.used > self.total:
            raise SchedulerError(f"{self.used} bytes are used, of {self.total}")
        if self.users != Counter(job.adapter for job in jobs if job.adapter is not None):
            raise SchedulerError(f"adapters in use are counted as {dict(self.users)}")
        if any(self.cache.state(adapter) != "loading" for adapter in self.loading):
            raise SchedulerError(f"not all of {list(self.loading)} are loading")
        if any(not self._resident(adapter) for adapter in self.users):
            raise SchedulerError(f"not all of {list(self.users)}, which are in use, are resident")
        self.cache.check()


class RequestState(Generic[K, A]):
    """The requests in `queues`, and those that run in `total` bytes beside the adapters of `cache`.

    Where at most `slots` requests can run at a time, each borrows at least that share of the memory from its quota.
    """

    def __init__(self, queues: Queues[K, A], cache: AdapterCache[A], total: int, slots: int | None) -> None:
        self.queues = queues
        self.memory: SharedMemory[K, A] = SharedMemory(total, cache)
        self.waiting: dict[K, Waiting[K, A]] = {}
        self.running: dict[K, Running[K, A]] = {}
        self.booked: dict[K, Waiting[K, A]] = {}
        """Those that wait and must not be put off for long, in the order in which that was found."""
        self.squashed: dict[K, int] = {}
        """Those that were squashed -> tokens that their answers had then."""
        self.admitted: Counter[int] = Counter()
        """By lane, as is the next."""
        self.waited_s: dict[int, float] = {}
        self.bypassed = 0
        self.squashes = 0
        self._cache = cache
        self._least = total // slots if slots else 0

    def borrows(self, job: Job[K, A]) -> int:
        """Bytes of its lane's quota that `job` needs."""
        return max(self.memory.bytes(job), self._least)

    def enqueue(self, job: Job[K, A], lane: Lane[K, A]) -> None:
        """`job` is in `lane`, and waits."""
        self.waiting[job.key] = Waiting(job, lane)
        if job.adapter is not None:
            self._cache.want(job.adapter)

    def dequeue(self, waiting: Waiting[K, A]) -> None:
        """It waits no longer."""
        job = waiting.job
        waiting.lane.jobs.remove(job)
        del self.waiting[job.key]
        if self.booked.pop(job.key, None):
            self._keep_first()
        if job.adapter is not None:
            self._cache.unwant(job.adapter)

    def book(self, lane: Lane[K, A], first_from: float) -> None:
        """Let the head of `lane` go first from some time on, unless another of the lane is booked."""
        head = self.waiting[lane.jobs[0].key]
        if head.first_from is not None:
            head.first_from = min(head.first_from, first_from)
        elif all(booked.lane is not lane for booked in self.booked.values()):
            head.first_from = first_from
            self.booked[head.job.key] = head
            self._keep_first()

    def patience_ends(self, now: float) -> float:
        """When the next goes first of those that are booked for later than `now`; infinite if there are none."""
        booked = (waiting.first_from for waiting in self.booked.values() if waiting.first_from is not None)
        return min((first_from for first_from in booked if first_from > now), default=math.inf)

    def _keep_first(self) -> None:
        """The adapter of the one booked first stays, so that at least that one gets on."""
        first = next(iter(self.booked.values()), None)
        self.memory.keep(first.job.adapter if first else None)

    def admit(self, waiting: Waiting[K, A], now: float, spare_wanted: bool, passed: list[K]) -> list[A] | None:
        """Let a request run, for which nothing is lacking. Returns as `SharedMemory.take`."""
        job, lane = waiting.job, waiting.lane
        evicted = self.memory.take(job, now, spare_wanted)
        if evicted is None:
            return None
        self.dequeue(waiting)
        borrowed = self.borrows(job)
        lane.used += borrowed
        begun = self.squashed.get(job.key, 0)
        self.running[job.key] = Running(job, lane, borrowed, now, passed, begun, begun)
        if job.key not in self.squashed:
            self.admitted[lane.index] += 1
            self.waited_s[lane.index] = self.waited_s.get(lane.index, 0.0) + now - job.arrived
        return evicted

    def leave(self, running: Running[K, A], now: float) -> None:
        """A request runs no longer."""
        del self.running[running.job.key]
        running.lane.used -= running.borrowed
        self.memory.give_back(running.job, now)

    def squash(self, running: Running[K, A], now: float) -> None:
        """A request waits again, at the head of its queue; as long an answer as it has is guessed to be still to come.

        What it has of its answer is computed again as part of its prompt.
        """
        self.leave(running, now)
        job = running.job
        tokens = running.tokens - running.begun
        job = job._replace(prompt=job.prompt + tokens, output=max(tokens, 1))
        running.lane.jobs.insert(0, job)
        self.enqueue(job, running.lane)
        self.squashed[job.key] = running.tokens
        self.squashes += 1

    def reclassify(self) -> None:
        """There are other lanes; those that wait are in them."""
        for lane in self.queues.lanes:
            for job in lane.jobs:
                self.waiting[job.key].lane = lane
        for running in self.running.values():
            running.lane = self.queues.lane_of(running.job)
            running.lane.used += running.borrowed

    def check(self) -> None:
        """Raise SchedulerError, or the cache's CacheError, unless everything agrees."""
        self.memory.check(running.job for running in self.running.values())
        queued = [job for lane in self.queues.lanes for job in lane.jobs]
        if len(queued) != len(self.waiting) or any(self.waiting[job.key].job is not job for job in queued):
            raise SchedulerError(f"{len(self.waiting)} requests wait, but {len(queued)} are queued")
        if self.waiting.keys() & self.running.keys() or not self.booked.keys() <= self.waiting.keys():
            raise SchedulerError("a request waits and runs, or is booked and does not wait")
        for lane in self.queues.lanes:
            borrowed = sum(running.borrowed for running in self.running.values() if running.lane is lane)
            if lane.used != borrowed:
                raise SchedulerError(f"{lane.used} bytes of lane {lane.index} are counted as used, {borrowed} are")
            if any(self.waiting[job.key].lane is not lane for job in lane.jobs):
                raise SchedulerError(f"a request of lane {lane.index} is said to be in another")
