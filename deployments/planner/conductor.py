"""Keeps one service's replicas on the lengths that arrive: gather demand, plan, move replicas to the plan (Arlo §4).

Plain asyncio, without Ray. Nothing here is needed to answer requests, and nothing is remembered that the replicas do
not report: a conductor that starts anew goes on from what they hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import Any, Protocol

from pliant.config import EncoderConfig
from pliant.deployments.encoder.engine import Assignment, Report
from pliant.deployments.encoder.lengths import Lengths
from pliant.deployments.encoder.routing_table import RoutingTable
from pliant.deployments.planner.messages import Guidance, News
from pliant.policies.autoscaling import TargetTracking
from pliant.policies.planning import Planner, Reason, solve
from pliant.policies.replacement import batches
from pliant.policies.service_times import service_times

logger = logging.getLogger("pliant")

_MAY_COME_BACK_S = 5.0
_PREPARE_WITHIN_S = 900.0
_MOVE_WITHIN_S = 60.0
_QUARANTINE_S = 60.0
_ENOUGH_FAILURES = 2
"""Replicas that failed to load a length that none holds, before plans do without it."""
_NEWS_FOR_S = 5.0


class ReplicaCalls(Protocol):
    """Calls to the replica that an assignment names. Any may raise anything: the replica may be gone."""

    async def prepare(self, assignment: Assignment) -> None: ...

    async def hold(self, assignment: Assignment) -> Report: ...


class Conductor:
    """`step` plans when it is time and carries out one batch of moves; it is to be called again and again.

    `changed()` is called whenever `guidance` has something new. Times are those of `clock`, in seconds.
    """

    def __init__(
        self,
        service: str,
        config: EncoderConfig,
        lengths: Lengths,
        table: RoutingTable,
        replicas: ReplicaCalls,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._lengths = lengths
        self._table = table
        self._replicas = replicas
        self._changed = changed
        self._clock = clock
        self._planner = Planner(lengths.longest, config.slo_ms / 1e3, config.period_s, config.demand_quantile)
        self._tracking = TargetTracking(config.replicas.min, config.replicas.max)
        self._seconds: dict[int, float] = {}
        self._moving: frozenset[str] = frozenset()
        self._moved: dict[str, tuple[float, Report]] = {}
        self._failures: dict[tuple[str, int], float] = {}
        self._missing_since: float | None = None
        self._planned_at = 0.0
        self._solve_s = 0.0
        self._moves = self._failed_moves = 0
        self._last_move_s = 0.0
        self.wanted: int | None = None
        """How many replicas the service should have now; None until some have been heard of."""

    def hear(self, news: News) -> None:
        """Take in what a gateway saw."""
        now = self._clock()
        self._planner.observe(now, news.arrived)
        self._tracking.observe(now, news.answered, news.near_slo, news.above_half, news.shed)

    def guidance(self) -> Guidance:
        """What gateways should know now."""
        now = self._clock()
        fresh = {replica: report for replica, (at, report) in self._moved.items() if now - at < _NEWS_FOR_S}
        return Guidance(self._moving, fresh, self._facts(now))

    async def step(self) -> None:
        """Decide on the number of replicas, plan if it is time to, and move one batch of replicas towards the plan."""
        reports = self._table.reports()
        if not reports:
            return
        now = self._clock()
        self.wanted = self._tracking.desired(now, len(reports))
        self._learn_service_times(reports)
        barred = self._barred(now, reports)
        usable = _usable(self._lengths.current, reports, barred)
        if not usable:
            return
        reason = self._planner.due(now, len(reports), usable)
        if reason in ("start", "shift", "period") and self._lengths.choose(self._planner.histogram(now)):
            usable = _usable(self._lengths.current, reports, barred)
        if reason and not (reason == "replicas" and self._may_come_back(now, reports, usable[-1])):
            await self._plan(reason, len(reports), usable)
        plan = self._planner.plan
        if plan and sum(plan.counts.values()) == len(reports):
            await self._move(reports, plan.counts, barred)

    def _learn_service_times(self, reports: Mapping[str, Report]) -> None:
        for length in {report["max_length"] for report in reports.values()} - {0}:
            self._seconds[length] = median(
                report["service_s"] for report in reports.values() if report["max_length"] == length
            )

    def _barred(self, now: float, reports: Mapping[str, Report]) -> dict[str, set[int]]:
        """The lengths that each replica should not be asked for, because it failed to load them."""
        self._failures = {failure: at for failure, at in self._failures.items() if now - at < _QUARANTINE_S}
        barred = {replica: set(report["failed"]) for replica, report in reports.items()}
        for replica, length in self._failures:
            if replica in barred:
                barred[replica].add(length)
        return barred

    def _may_come_back(self, now: float, reports: Mapping[str, Report], longest: int) -> bool:
        """Whether to wait a little for a replica that was lost, as Serve starts another in its place at once."""
        plan = self._planner.plan
        if not plan or len(reports) >= sum(plan.counts.values()):
            self._missing_since = None
            return False
        if self._missing_since is None:
            self._missing_since = now
        covered = any(report["max_length"] >= longest for report in reports.values())
        return covered and now - self._missing_since < _MAY_COME_BACK_S

    async def _plan(self, reason: Reason, replicas: int, lengths: tuple[int, ...]) -> None:
        self._missing_since = None
        if not self._seconds:
            return
        now = self._clock()
        seconds = service_times(lengths, self._seconds, self._lengths.service_s)
        problem = self._planner.problem(now, replicas, seconds)
        started = time.perf_counter()
        allocation = await asyncio.to_thread(solve, problem)
        self._solve_s = time.perf_counter() - started
        plan = self._planner.adopt(now, problem, allocation, reason)
        self._planned_at = now
        logger.info("%s plan %d (%s): %s", self._service, plan.version, reason, plan.counts)
        if allocation.overload:
            logger.warning(
                "%s: demand exceeds what %d replicas can answer in time by %.0f requests per SLO period; add replicas",
                self._service,
                replicas,
                allocation.overload,
            )
        self._changed()

    async def _move(
        self, reports: Mapping[str, Report], counts: Mapping[int, int], barred: Mapping[str, Collection[int]]
    ) -> None:
        """The first batch of what still differs from `counts`: prepare, stop routing, drain and load, publish."""
        holds = {replica: report["max_length"] for replica, report in reports.items()}
        busy = {replica: report["waiting"] for replica, report in reports.items()}
        planned = batches(holds, counts, busy, barred)
        if not planned:
            return
        ready = await self._each(planned[0], self._prepare)
        if not ready:
            return
        self._moving = frozenset(ready)
        self._changed()
        started = time.perf_counter()
        try:
            moved = await self._each({replica: planned[0][replica] for replica in ready}, self._hold)
        finally:
            self._moving = frozenset()
            self._changed()
        self._moves += len(moved)
        self._last_move_s = time.perf_counter() - started

    async def _each(self, batch: Mapping[str, int], call: Callable[[Assignment], Any]) -> list[str]:
        """The replicas of `batch` for which `call` succeeded; the others are not asked again for some time."""
        results = await asyncio.gather(
            *(call(Assignment(replica, length)) for replica, length in batch.items()), return_exceptions=True
        )
        done = []
        for (replica, length), result in zip(batch.items(), results, strict=True):
            if isinstance(result, BaseException):
                self._failures[replica, length] = self._clock()
                self._failed_moves += 1
                reason = " ".join(str(result).split()) or type(result).__name__
                logger.warning("%s: replica %s cannot hold %d: %s", self._service, replica, length, reason[-300:])
            else:
                done.append(replica)
        return done

    async def _prepare(self, assignment: Assignment) -> None:
        async with asyncio.timeout(_PREPARE_WITHIN_S):
            await self._replicas.prepare(assignment)

    async def _hold(self, assignment: Assignment) -> None:
        async with asyncio.timeout(_MOVE_WITHIN_S):
            report = await self._replicas.hold(assignment)
        self._table.observe(assignment.replica, report)
        self._moved[assignment.replica] = self._clock(), report

    def _facts(self, now: float) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "moves": self._moves,
            "failed_moves": self._failed_moves,
            "last_move_s": round(self._last_move_s, 3),
            "lengths": list(self._lengths.current),
        }
        if self.wanted is not None:
            facts["wanted_replicas"] = self.wanted
        plan = self._planner.plan
        if plan:
            facts |= {
                "version": plan.version,
                "reason": plan.reason,
                "age_s": round(now - self._planned_at, 1),
                "solve_s": round(self._solve_s, 4),
                "replicas": {str(length): count for length, count in plan.counts.items()},
                "demand_per_s": {str(length): round(rate, 2) for length, rate in plan.demand.items()},
                "predicted_latency_s": round(plan.allocation.latency_s, 4),
                "feasible": plan.allocation.feasible,
                "overload": round(plan.allocation.overload, 2),
            }
        return facts


def _usable(
    lengths: Collection[int], reports: Mapping[str, Report], barred: Mapping[str, Collection[int]]
) -> tuple[int, ...]:
    """The lengths that plans may use: those that some replica holds, or that few enough failed to load."""
    enough = min(_ENOUGH_FAILURES, len(reports))
    held = {report["max_length"] for report in reports.values()}
    return tuple(
        length
        for length in sorted(lengths)
        if length in held or sum(length in barred[replica] for replica in reports) < enough
    )
