"""A queue for each class of requests, each with a share of the memory of its own (Chameleon §4.2).

Small requests, as their weighted size has it, have an express lane, and large ones are due a share that no number of
small ones takes from them. Which classes there are and what each is due is learned from the requests (see
`queue_classes`); how they are admitted is the scheduler's part (see `request_scheduler`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Generic

from pliant.policies.llm.jobs import A, Job, K
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Lane


class MultiQueue(Generic[K, A]):
    """Chameleon's queues; within each, requests wait in order of arrival.

    A class that is alone has no quota: memory itself is all that limits it. Smaller requests are preferred for
    `patience_s` seconds to a head of a larger class that has its memory, when slots or prompt tokens are short: quotas
    say nothing of these.
    """

    strict = False

    def __init__(self, classes: QueueClasses, patience_s: float = 1.0) -> None:
        if not patience_s >= 0:
            raise ValueError(f"patience_s must be at least 0, got {patience_s}")
        self.patience_s = patience_s
        self.lanes: Sequence[Lane[K, A]] = (Lane(),)
        self._classes = classes

    def add(self, job: Job[K, A], now: float) -> Lane[K, A]:
        self._classes.observe(now, job.prompt, job.output, job.adapter_bytes, job.charge)
        lane = self.lane_of(job)
        lane.jobs.append(job)
        return lane

    def lane_of(self, job: Job[K, A]) -> Lane[K, A]:
        return self.lanes[self._classes.classify(job.prompt, job.output, job.adapter_bytes)]

    def ended(self, job: Job[K, A], seconds: float) -> None:
        self._classes.ended(job.prompt, job.output, job.adapter_bytes, seconds)

    def refresh(self, now: float, total: int) -> bool:
        if not self._classes.due(now):
            return False
        jobs = sorted((job for lane in self.lanes for job in lane.jobs), key=lambda job: job.arrived)
        queues = self._classes.learn(now, total)
        self.lanes = [Lane(index, *queue) for index, queue in enumerate(queues)] if len(queues) > 1 else [Lane()]
        for job in jobs:
            self.lane_of(job).jobs.append(job)
        return True

    def waiting(self) -> Iterator[Job[K, A]]:
        return (job for _, _, job in self._turns())

    def ahead(self, job: Job[K, A]) -> list[Job[K, A]]:
        lane = self.lane_of(job)
        last = (sum(map(_work, lane.jobs)) / max(lane.quota, 1), lane.index)
        return [other for _, _, other in takewhile(lambda turn: turn[:2] <= last, self._turns())]

    def _turns(self) -> Iterator[tuple[float, int, Job[K, A]]]:
        """All that wait by the iteration of their turn: a lane works off its quota's bytes in each."""
        return heapq.merge(*map(_lane_turns, self.lanes), key=lambda turn: turn[:2])


def _lane_turns(lane: Lane[K, A]) -> Iterator[tuple[float, int, Job[K, A]]]:
    work = 0.0
    for job in lane.jobs:
        yield work / max(lane.quota, 1), lane.index, job
        work += _work(job)


def _work(job: Job[K, A]) -> float:
    """Bytes that it holds, times the iterations for which it does."""
    return float((job.charge + job.adapter_bytes) * job.output)
