"""One round of admissions: each queue within its quota, then what is over (Chameleon §4.2, Algorithm 1).

Small requests go first in both phases. Before them go those that are booked, and when all are through, adapters are
loaded ahead for those that still wait. What may pass a request that waits for memory, `bypass` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from itertools import islice
from typing import Generic

from pliant.policies.llm.bypass import Blocked
from pliant.policies.llm.jobs import A, Decisions, Job, K
from pliant.policies.llm.queue_order import Lane
from pliant.policies.llm.request_state import RequestState, Waiting

_LOOK_AHEAD = 32
"""Requests of a queue that are tried in vain before the rest has to wait for another round; and those that wait for
which adapters are loaded ahead."""


class _Outcome(Enum):
    ADMITTED = "it runs from now on"
    LOADING = "its adapter is not there yet"
    BLOCKED = "its memory is not there"
    DENIED = "it would put off one that is blocked or within its quota"
    LIMITED = "no more slots or prompt tokens in this round"


class Round(Generic[K, A]):
    """Decides what to do next, and does it to `state`; for one round."""

    def __init__(self, state: RequestState[K, A], now: float, slots: int, prompts: int, loads: int) -> None:
        self.decisions: Decisions[K, A] = Decisions([], [], [], [])
        self._state = state
        self._memory = state.memory
        self._now = now
        self._slots = slots
        self._prompts = prompts
        self._loads = loads
        self._tried: set[K] = set()
        """Requests that get no other chance in this round."""
        self._blocked: list[Blocked[K, A]] = []
        """Those that wait for memory, or for their adapters, and are within their quotas."""

    @property
    def limited(self) -> bool:
        """Whether nobody can be admitted in this round any more."""
        return self._slots <= 0 or self._prompts <= 0

    def trim(self) -> None:
        """Evict what the cache would not keep any longer."""
        self.decisions.evict.extend(self._memory.trim(self._now))

    def admit(self, first: Collection[K] = ()) -> None:
        """Algorithm 1, after those that are booked: for those that go `first`, then for all.

        Where nothing ran and no load was under way, somebody gets on. The first that is tried does, as whatever could
        be in its way can be evicted: all but the adapter of the one that is booked first. If that holds everybody up,
        because it is booked for later, it need not wait any longer.
        """
        if not self.limited:
            if first:
                self._admit(first)
            if not (self._state.queues.strict and any(key in self._state.waiting for key in first)):
                self._admit(None)
            if self._state.booked and not (self._state.running or self._memory.loading):
                self._try_alone(next(iter(self._state.booked.values())))
        if self.limited and not self._state.queues.strict:
            self._book_put_off()

    def _admit(self, among: Collection[K] | None) -> None:
        """Algorithm 1 `among` some requests, or all."""
        for waiting in list(self._state.booked.values()):
            ripe = waiting.first_from is not None and waiting.first_from <= self._now
            if ripe and waiting.job.key not in self._tried and (among is None or waiting.job.key in among):
                self._try_booked(waiting)
        beyond = [self._within_quota(lane, among) for lane in self._state.queues.lanes]
        for jobs in beyond:
            self._lend(jobs)

    def _try_booked(self, waiting: Waiting[K, A]) -> None:
        self._tried.add(waiting.job.key)
        outcome = self._try(waiting)
        if outcome is _Outcome.BLOCKED and not self._blocked and self._squash_for(waiting.job):
            outcome = self._try(waiting)
        self._block(waiting.job, outcome)

    def _try_alone(self, waiting: Waiting[K, A]) -> None:
        """Let it get on, whoever is blocked."""
        blocked, self._blocked = self._blocked, []
        self._try(waiting)
        self._blocked = [one for one in blocked if one.job is not waiting.job]
        self._changed()

    def _squash_for(self, job: Job[K, A]) -> bool:
        """Squash what is overdue and has passed `job`, before which no other goes, if that lets it start."""
        overdue = Blocked(job, self._memory, self._state.running.values()).overdue()
        for running in overdue:
            self._state.squash(running, self._now)
            self._tried.add(running.job.key)
            self.decisions.squash.append(running.job.key)
            self._changed()
        return bool(overdue)

    def _within_quota(self, lane: Lane[K, A], among: Collection[K] | None) -> list[Job[K, A]]:
        """The first phase: admit from `lane`; returns those that are beyond its quota, in order."""
        strict = self._state.queues.strict
        jobs = [job for job in lane.jobs if among is None or job.key in among]
        in_vain = 0
        for index, job in enumerate(jobs):
            if job.key in self._tried:
                continue
            waiting = self._state.waiting[job.key]
            if not lane.within(self._state.borrows(job)):
                return jobs[index:]
            outcome = self._try(waiting)
            if outcome is _Outcome.ADMITTED:
                continue
            if outcome is _Outcome.LIMITED:
                return []
            leads = lane.jobs[0] is job
            if leads or (among is not None and not in_vain):
                self._tried.add(job.key)
                self._block(job, outcome)
                if strict:
                    return []
            if leads:
                self._state.book(lane, self._now)
            in_vain += 1
            if in_vain == _LOOK_AHEAD:
                return []
        return []

    def _lend(self, jobs: list[Job[K, A]]) -> None:
        """The second phase: admit `jobs` of a lane, which are beyond its quota, as long as the next one fits."""
        for job in jobs[:_LOOK_AHEAD]:
            if job.key in self._tried:
                continue
            outcome = self._try(self._state.waiting[job.key], loan=True)
            if outcome not in (_Outcome.ADMITTED, _Outcome.LOADING):
                return

    def _try(self, waiting: Waiting[K, A], loan: bool = False) -> _Outcome:
        """Let a request run, or have its adapter loaded, if that is possible."""
        job, memory = waiting.job, self._memory
        if self.limited:
            return _Outcome.LIMITED
        if job.adapter in memory.loading:
            return _Outcome.LOADING
        if memory.lacking(job) > 0:
            return _Outcome.BLOCKED
        passed = self._passed(job)
        if passed is None:
            return _Outcome.DENIED
        spare_wanted = loan or bool(self._blocked)
        if memory.absent(job):
            self._load_for(job, spare_wanted)
            return _Outcome.LOADING
        evicted = self._state.admit(waiting, self._now, spare_wanted, passed)
        if evicted is None:
            return _Outcome.DENIED
        self._state.bypassed += bool(self._blocked)
        self._slots -= 1
        self._prompts -= job.prompt
        self.decisions.evict.extend(evicted)
        self.decisions.admit.append(job)
        self._changed()
        return _Outcome.ADMITTED

    def _passed(self, job: Job[K, A]) -> list[K] | None:
        """Whom `job` passes for no longer than it is predicted to run; None if it may not pass them."""
        passed = []
        for blocked in self._blocked:
            if blocked.leaves(self._memory.bytes(job)):
                continue
            if job.key in self._state.squashed or not blocked.may_pass(job):
                return None
            passed.append(blocked.job.key)
        return passed

    def _block(self, job: Job[K, A], outcome: _Outcome) -> None:
        """From now on in this round others pass `job`, if it waits for memory or its adapter, only as they may."""
        if outcome in (_Outcome.BLOCKED, _Outcome.LOADING):
            self._blocked.append(Blocked(job, self._memory, self._state.running.values()))

    def _changed(self) -> None:
        for blocked in self._blocked:
            blocked.changed()

    def _book_put_off(self) -> None:
        """Slots or prompt tokens are at an end: heads that are within their quotas go first when patience is over."""
        for lane in self._state.queues.lanes:
            if lane.jobs and lane.within(self._state.borrows(lane.jobs[0])):
                self._state.book(lane, self._now + self._state.queues.patience_s)

    def load_pinned(self) -> None:
        """Load the adapters that are to stay, before all others."""
        for adapter, bytes in self._memory.pinned.items():
            if self._memory.cache.state(adapter) == "absent":
                self._load(adapter, bytes, spare_wanted=False)

    def load_ahead(self) -> None:
        """Load adapters of requests that wait: of the one that is blocked first, then in the order of likely admission.

        For the latter no adapter goes that is wanted, and what the blocked ones wait for is left to them.
        """
        memory = self._memory
        if self._blocked and memory.absent(self._blocked[0].job):
            self._load_for(self._blocked[0].job, spare_wanted=False)
        for job in islice(self._state.queues.waiting(), _LOOK_AHEAD):
            if len(memory.loading) >= self._loads:
                return
            if memory.absent(job):
                left = all(blocked.leaves(job.adapter_bytes) for blocked in self._blocked)
                if not left or not self._load_for(job, spare_wanted=True):
                    return

    def load_likely(self, adapters: Iterable[tuple[A, int]]) -> None:
        """Load adapters, given with their bytes, for which nobody waits yet.

        Into memory that is free, or that adapters take which nobody waits for and nobody used within the cache's
        window; and not while somebody waits for memory.
        """
        for adapter, bytes in adapters:
            if not self._blocked and self._memory.cache.state(adapter) == "absent":
                self._load(adapter, bytes, spare_wanted=True, spare_recent=True)

    def _load_for(self, job: Job[K, A], spare_wanted: bool) -> bool:
        return job.adapter is not None and self._load(job.adapter, job.adapter_bytes, spare_wanted)

    def _load(self, adapter: A, bytes: int, spare_wanted: bool, spare_recent: bool = False) -> bool:
        """Have an absent adapter loaded, if there is room for it, and not too many loads are under way."""
        if len(self._memory.loading) >= self._loads:
            return False
        evicted = self._memory.begin_load(adapter, bytes, self._now, spare_wanted, spare_recent)
        if evicted is None:
            return False
        self.decisions.evict.extend(evicted)
        self.decisions.load.append(adapter)
        self._changed()
        return True
