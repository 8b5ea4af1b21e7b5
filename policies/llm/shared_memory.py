"""The memory that requests which run share with adapters, counted in bytes (Chameleon §4.1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.jobs import A, Job, K, SchedulerError

K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)


class Again(NamedTuple):
    """What a request loses that makes way."""

    seconds: float
    """To compute again what it alone has."""
    shared: int
    """Bytes that it has together with others, which stay."""


class Sharing(Protocol[K_contra]):
    """Where requests that run have their memory; they may have some of it together."""

    @property
    def saved(self) -> int:
        """Bytes by which those that run need less than they are charged for, because they share."""
        ...

    def saves(self, key: K_contra) -> int:
        """Bytes that a request would share with those that run, if it began now."""
        ...

    def again(self, key: K_contra) -> Again:
        """What it would take to bring back what a request that runs has."""
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

    def again(self, key: K) -> Again:
        return Again(0.0, 0)

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

    def loss(self, job: Job[K, A]) -> float:
        """Seconds to compute again what `job`, which runs, alone has, for each byte that is free when it makes way."""
        again = self.sharing.again(job.key)
        freed = job.charge - again.shared
        return again.seconds / freed if freed > 0 else math.inf

    def again_s(self, job: Job[K, A]) -> float:
        """Seconds to compute again what `job`, which runs, alone has."""
        return self.sharing.again(job.key).seconds

    def extend(self, job: Job[K, A], charge: int, now: float) -> list[A]:
        """`job`, which runs, is charged so much from now on; returns what was evicted for it. There must be room."""
        evicted = self._make_room(charge - job.charge, now, spare_wanted=False)
        self._charges += charge - job.charge
        return evicted or []

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
