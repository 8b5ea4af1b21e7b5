"""In which order requests wait: first in, first out, or the shortest first; what a scheduler asks of any order.

Both are the alternatives that Chameleon's many queues (`multi_queue`) are compared with: S-LoRA's order and µServe's
(Chameleon §3.3 and §5.3). They have one queue, and when its head cannot start, nobody does.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol

from pliant.policies.llm.jobs import A, Job, K


class Lane(Generic[K, A]):
    """A queue, and how much memory its requests may hold."""

    def __init__(self, index: int = 0, cut_off: float = math.inf, quota: float = math.inf) -> None:
        self.index = index
        """Its place, 0 for the smallest requests."""
        self.cut_off = cut_off
        """The greatest weighted size of its requests."""
        self.quota = quota
        """Bytes that its running requests may borrow."""
        self.used = 0
        """Bytes that they have borrowed."""
        self.jobs: list[Job[K, A]] = []
        """Those that wait, in order."""

    def within(self, bytes: int) -> bool:
        """Whether a request that borrows `bytes` is within the quota; a request alone always is."""
        return not self.used or self.used + bytes <= self.quota


class Queues(Protocol[K, A]):
    """Where requests wait, and which are next."""

    strict: bool
    """Whether nobody passes the head of a queue that cannot start, for whatever reason."""
    patience_s: float
    """For how long smaller requests may be preferred to a head that could start but for slots or prompt tokens."""
    lanes: Sequence[Lane[K, A]]
    """Those of small requests first. The scheduler removes jobs, and counts what is used."""

    def add(self, job: Job[K, A], now: float) -> Lane[K, A]:
        """Queue a request that has just come; returns where."""
        ...

    def lane_of(self, job: Job[K, A]) -> Lane[K, A]:
        """Where a request belongs."""
        ...

    def ended(self, job: Job[K, A], seconds: float) -> None:
        """A request, as it was when it was added, had its memory for `seconds`."""
        ...

    def refresh(self, now: float, total: int) -> bool:
        """Share `total` bytes out anew, if it is time to. True if there are other lanes now, in which nothing is used;
        those that wait are in them already."""
        ...

    def waiting(self) -> Iterator[Job[K, A]]:
        """All that wait, those first that will likely be admitted first. Nothing may change meanwhile."""
        ...

    def ahead(self, job: Job[K, A]) -> list[Job[K, A]]:
        """Those that will likely be admitted before `job`, if that is added now."""
        ...


class Fifo(Generic[K, A]):
    """Strictly in order of arrival, as S-LoRA has it. The next of n waits until n have ended, however long they are."""

    strict = True
    patience_s = 0.0

    def __init__(self) -> None:
        self.lanes: Sequence[Lane[K, A]] = (Lane(),)

    def add(self, job: Job[K, A], now: float) -> Lane[K, A]:
        lane = self.lanes[0]
        lane.jobs.append(job)
        return lane

    def lane_of(self, job: Job[K, A]) -> Lane[K, A]:
        return self.lanes[0]

    def ended(self, job: Job[K, A], seconds: float) -> None:
        return

    def refresh(self, now: float, total: int) -> bool:
        return False

    def waiting(self) -> Iterator[Job[K, A]]:
        return iter(self.lanes[0].jobs)

    def ahead(self, job: Job[K, A]) -> list[Job[K, A]]:
        return self.lanes[0].jobs.copy()


class ShortestFirst(Fifo[K, A]):
    """The shortest predicted answer first, as µServe has it; each second of waiting counts as `ageing` tokens less.

    So nobody starves: a request is passed only by those that arrive within its predicted tokens / `ageing` seconds
    after it.
    """

    def __init__(self, ageing: float = 4.0) -> None:
        super().__init__()
        if not ageing > 0:
            raise ValueError(f"ageing must be above 0 tokens per second, or long requests starve; got {ageing}")
        self._ageing = ageing

    def add(self, job: Job[K, A], now: float) -> Lane[K, A]:
        lane = self.lanes[0]
        insort(lane.jobs, job, key=self._rank)
        return lane

    def ahead(self, job: Job[K, A]) -> list[Job[K, A]]:
        jobs = self.lanes[0].jobs
        return jobs[: bisect_right(jobs, self._rank(job), key=self._rank)]

    def _rank(self, job: Job[K, A]) -> float:
        """Predicted tokens less those that it has waited off, up to a term that is the same for all."""
        return job.output + self._ageing * job.arrived
