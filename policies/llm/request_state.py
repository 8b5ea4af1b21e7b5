"""Which requests wait and which run, what they hold, and how they go from the one to the other (Chameleon §4.2).

What is decided by `two_phase_admission` is done here, so that queues, quotas, memory and cache always agree.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Generic

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.jobs import A, Extension, Job, K, SchedulerError
from pliant.policies.llm.queue_order import Lane, Queues
from pliant.policies.llm.shared_memory import SharedMemory


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
        """Those that were put back -> tokens that their answers had then."""
        self.admitted: Counter[int] = Counter()
        """By lane, as is the next."""
        self.waited_s: dict[int, float] = {}
        self.bypassed = 0
        self.squashes = 0
        self.preemptions = 0
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
        """A request that passed others waits again, for it has run for longer than predicted."""
        self._put_back(running, now)
        self.squashes += 1

    def extend(self, running: Running[K, A], charge: int, now: float, step_s: float) -> Extension[K, A]:
        """A request is charged more from now on, or waits for that.

        Of those that came later make way whose memory takes the least to compute again, and then itself; but where
        another is predicted to end within less time than that takes, it waits. Whoever came first always goes on.
        """
        preempted: list[K] = []
        while charge - running.job.charge > self.memory.free + self._cache.idle:
            victim = self._victim(running)
            if self.memory.again_s(victim.job) > self._wait_s(running, step_s):
                return Extension([], preempted, waits=True)
            self._put_back(victim, now)
            self.preemptions += 1
            preempted.append(victim.job.key)
            if victim is running:
                return Extension([], preempted)
        evicted = self.memory.extend(running.job, charge, now)
        running.job = running.job._replace(charge=charge)
        return Extension(evicted, preempted)

    def _victim(self, running: Running[K, A]) -> Running[K, A]:
        came = running.job.arrived
        later = [one for one in self.running.values() if one.job.arrived > came]
        return min(later, key=lambda one: (self.memory.loss(one.job), -one.job.arrived), default=running)

    def _wait_s(self, running: Running[K, A], step_s: float) -> float:
        """Until one of the others ends as predicted, in iterations of `step_s`; forever for the one that came first."""
        others = [one for one in self.running.values() if one is not running]
        if all(running.job.arrived <= one.job.arrived for one in others):
            return math.inf
        return min((one.left * step_s for one in others if not one.overdue), default=math.inf)

    def recharge(self, waiting: Waiting[K, A], charge: int) -> None:
        """A request that waits will be charged so much."""
        jobs = waiting.lane.jobs
        at = next(at for at, job in enumerate(jobs) if job is waiting.job)
        waiting.job = jobs[at] = waiting.job._replace(charge=charge)

    def _put_back(self, running: Running[K, A], now: float) -> None:
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
