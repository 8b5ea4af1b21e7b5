"""Who may pass a request that waits for memory, and what happens when that was a mistake (Chameleon §4.2, Bypassing).

A younger request may pass if it is predicted to end before the blocked one could start; and, beyond the paper, if it
takes only memory that the blocked one would leave over then (as EASY backfilling has it). One of the first kind that
outlives its prediction is squashed, but only when that lets the one start that it passed: otherwise nothing is gained.
A request that was squashed is never admitted so again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple

from pliant.policies.llm.jobs import A, Job, K
from pliant.policies.llm.request_state import Running
from pliant.policies.llm.shared_memory import SharedMemory


class Prospect(NamedTuple):
    """When a blocked request will have its memory, as predicted."""

    start: float
    """In how many iterations, infinite if all that run are not enough."""
    extra: int
    """Bytes that will be left over then."""


class Blocked(Generic[K, A]):
    """A request that waits for memory or for its adapter, and what that means for others."""

    def __init__(self, job: Job[K, A], memory: SharedMemory[K, A], running: Iterable[Running[K, A]]) -> None:
        self.job = job
        self._memory = memory
        self._running = running
        self._prospect: Prospect | None = None

    def changed(self) -> None:
        """Other requests run now, or other adapters are there: predict anew."""
        self._prospect = None

    def may_pass(self, job: Job[K, A]) -> bool:
        """Whether `job` is predicted to end before this one starts."""
        return job.output <= self.prospect.start

    def leaves(self, bytes: int) -> bool:
        """Whether `bytes` more may be taken for however long."""
        return bytes <= self.prospect.extra

    @property
    def prospect(self) -> Prospect:
        if self._prospect is None:
            self._prospect = self._predict()
        return self._prospect

    def _predict(self) -> Prospect:
        """What runs gives its memory back in the order of what is left; what loads can be evicted soon."""
        memory, own = self._memory, self.job.adapter
        loading = sum(bytes for adapter, bytes in memory.loading.items() if adapter != own)
        lacking = memory.lacking(self.job) - loading
        if lacking <= 0:
            return Prospect(0, -lacking)
        users = memory.users.copy()
        for running in sorted(self._running, key=lambda running: running.left):
            lacking -= freed(running.job, users, memory, own)
            if lacking <= 0:
                return Prospect(running.left, -lacking)
        return Prospect(math.inf, 0)

    def overdue(self) -> Sequence[Running[K, A]]:
        """Whom to squash so that this one can start: of those that passed it and are overdue; none if it is no use."""
        lacking = self._memory.lacking(self.job)
        users = self._memory.users.copy()
        squashed = []
        for running in sorted(self._running, key=lambda running: running.since, reverse=True):
            if running.overdue and self.job.key in running.passed:
                lacking -= freed(running.job, users, self._memory, self.job.adapter)
                squashed.append(running)
                if lacking <= 0:
                    return squashed
        return []


def freed(job: Job[K, A], users: dict[A, int], memory: SharedMemory[K, A], own: A | None) -> int:
    """Bytes that can be had when `job` ends, for a request that needs the adapter `own`; `users` is counted down."""
    if job.adapter is None:
        return job.charge
    users[job.adapter] -= 1
    evictable = not users[job.adapter] and job.adapter != own and not memory.stays(job.adapter)
    return job.charge + (job.adapter_bytes if evictable else 0)
