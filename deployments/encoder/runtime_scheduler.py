"""Keeps one service's replicas at home where texts arrive: gather demand, plan, move replicas to the plan (Arlo §4).

Plain asyncio, without Ray. Nothing here is needed to answer requests, and nothing is remembered that the replicas do
not report: a scheduler that starts anew goes on from what they hold.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.lengths import Lengths
from pliant.deployments.encoder.memory import residency
from pliant.deployments.encoder.messages import Assignment, Report, held_lengths, home
from pliant.deployments.encoder.scale_in import ScaleIn
from pliant.deployments.serving.errors import OutdatedPlannerError
from pliant.deployments.serving.messages import Guidance, News
from pliant.deployments.serving.table import ReplicaTable
from pliant.policies.cluster.autoscaling import TargetTracking
from pliant.policies.encoder.configurations import Configuration
from pliant.policies.encoder.planning import Plan, Planner, Reason, Residency, solve
from pliant.policies.encoder.replacement import batches
from pliant.policies.encoder.service_curve import ServiceCurve
from pliant.policies.encoder.service_times import LengthTimes, service_times

logger = logging.getLogger("pliant")

_MAY_COME_BACK_S = 5.0
_MOVES_WITHIN_S = 10.0
"""A replica that moves for longer is planned without, as if it were missing, until it is there again."""
_LOAD_WITHIN_S = 60.0
"""On top of the SLO, within which a replica drains."""
_QUARANTINE_S = (60.0, 3600.0)
"""After a first failure to load a length, and at most; each further failure doubles it."""
_ENOUGH_FAILURES = (2, 0.1)
"""Replicas, or the share of them, that failed to load a length which none holds, before plans do without it."""
_NEWS_FOR_S = 5.0
_SETTLED_S = 60.0
"""Until then a new scheduler does not ask for fewer replicas: more may be about to report."""


class ReplicaCalls(Protocol):
    """Calls to the replica that an assignment names. They may raise anything: the replica may be gone."""

    async def hold(self, assignment: Assignment) -> Report: ...


class _Failures(NamedTuple):
    """How often a replica failed to load a length, and when it last did."""

    times: int
    last: float

    def over(self, now: float) -> bool:
        """Whether the replica may be asked again."""
        first, most = _QUARANTINE_S
        return now - self.last >= min(first * 2.0 ** (self.times - 1), most)


class _Move(NamedTuple):
    """A replica on its way to another length."""

    since: float
    task: asyncio.Task[None]


class RuntimeScheduler:
    """`step` plans when it is time and begins one batch of moves; it is to be called again and again.

    `changed()` is called whenever `guidance` has something new. Times are those of `clock`, in seconds.
    """

    def __init__(
        self,
        service: str,
        config: EncoderConfig,
        lengths: Lengths,
        table: ReplicaTable[Any, Report],
        replicas: ReplicaCalls,
        first_to_stop: Callable[[Sequence[str]], Awaitable[Sequence[str]]],
        changed: Callable[[], None],
        clock: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self._service = service
        self._lengths = lengths
        self._table = table
        self._replicas = replicas
        self._changed = changed
        self._clock = clock
        self._slo_s = config.slo_ms / 1e3
        self._sets = not lengths.resident and config.residency == "several"
        self._planner = Planner(lengths.longest, self._slo_s, config.period_s, config.demand_quantile)
        self._tracking = TargetTracking(max(1, config.replicas.min), config.replicas.max)
        self._scale_in = ScaleIn(first_to_stop, self._slo_s + _LOAD_WITHIN_S, clock)
        self._started = clock()
        self._seconds: defaultdict[str, LengthTimes] = defaultdict(LengthTimes)
        """By device."""
        self._moving: dict[str, _Move] = {}
        self._moved: dict[str, tuple[float, Report]] = {}
        self._failures: dict[Assignment, _Failures] = {}
        self._missing_since: float | None = None
        self._planned_at = 0.0
        self._solve_s = 0.0
        self.outdated: OutdatedPlannerError | None = None
        """Why it moves nothing any more, if so: another one does."""
        self._moves = self._failed_moves = 0
        self._last_move_s = 0.0

    def hear(self, news: News) -> None:
        """Take in what a gateway saw."""
        now = self._clock()
        self._planner.observe(now, news.arrived)
        self._tracking.observe(now, news.answered, news.near_slo, news.above_half, news.shed)

    def guidance(self) -> Guidance:
        """What gateways should know now."""
        now = self._clock()
        self._moved = {replica: moved for replica, moved in self._moved.items() if now - moved[0] < _NEWS_FOR_S}
        reports = {replica: report for replica, (_, report) in self._moved.items()}
        moving = frozenset() if self._lengths.resident else frozenset(self._moving)
        return Guidance(moving=moving, reports=reports, plan=self._facts())

    def wanted(self) -> int | None:
        """How many replicas the service should have now; None while that cannot be said."""
        running = len(self._table.reports())
        if not running:
            return None
        now = self._clock()
        wanted = self._tracking.desired(now, running)
        return None if wanted <= running and now - self._started < _SETTLED_S else wanted

    def ready_for(self, wanted: int) -> int:
        """See `Part.ready_for`: others take over what those hold that are going to be stopped."""
        return self._scale_in.replicas(wanted, len(self._table.reports()))

    async def step(self) -> None:
        """Plan if it is time to, and begin to move replicas towards the plan unless some move; wait for none."""
        now = self._clock()
        present = self._present(now)
        reports = await self._scale_in.staying(present, list(self._table.reports()))
        if not reports or self.outdated:
            return
        self._learn_service_times(reports)
        barred = self._barred(now, reports)
        usable = _usable(self._lengths.current, reports, barred)
        if not usable:
            return
        reason = self._due(now, reports, usable, len(present))
        if reason in ("start", "shift", "period") and self._lengths.choose(self._planner.histogram(now)):
            usable = _usable(self._lengths.current, reports, barred)
        if reason:
            await self._plan(reason, reports, usable)
            reports = await self._scale_in.staying(self._present(now), list(self._table.reports()))
        plan = self._planner.plan
        if plan and (sum(plan.counts.values()) != len(reports) or reports.keys() & self._moving.keys()):
            return
        if not (plan and self._move(reports, self._wanted(plan), barred)):
            self._scale_in.settled()

    def _present(self, now: float) -> dict[str, Report]:
        """What replicas report, but for those that have been moving for too long."""
        return {
            replica: report
            for replica, report in self._table.reports().items()
            if replica not in self._moving or now - self._moving[replica].since < _MOVES_WITHIN_S
        }

    def _learn_service_times(self, reports: Mapping[str, Report]) -> None:
        held: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for report in reports.values():
            if report["curve"]:
                curve = ServiceCurve(report["curve"])
                for length in self._lengths.current if self._lengths.resident else held_lengths(report):
                    held[report["device"]][length].append(curve.seconds(length))
        for device, seconds in held.items():
            self._seconds[device].learn({length: median(each) for length, each in seconds.items()})

    def _service_times(self, reports: Mapping[str, Report]) -> dict[int, float]:
        """What is known of the devices that there are, whichever of them hold the length now."""
        known = defaultdict(list)
        for report in reports.values():
            for length, seconds in self._seconds[report["device"]].known.items():
                known[length].append(seconds)
        return {length: median(seconds) for length, seconds in known.items()}

    def _barred(self, now: float, reports: Mapping[str, Report]) -> dict[str, set[int]]:
        """The lengths that each replica should not be asked for now, because it failed to load them."""
        self._failures = {failed: known for failed, known in self._failures.items() if failed.replica in reports}
        for replica, report in reports.items():
            for length in report["failed"]:
                self._failures.setdefault(Assignment(replica, length), _Failures(1, now))
        barred: dict[str, set[int]] = {replica: set() for replica in reports}
        for failed, known in self._failures.items():
            if not known.over(now):
                barred[failed.replica].add(failed.max_length)
        return barred

    def _due(self, now: float, reports: Mapping[str, Report], usable: tuple[int, ...], present: int) -> Reason | None:
        """Why to plan now. A replica that is missing is waited for a little: it may start, or Serve another for it; one
        that is `present` but will be stopped is not."""
        covered = any(report["max_length"] >= usable[-1] for report in reports.values())
        reason = self._planner.due(now, len(reports), usable)
        plan = self._planner.plan
        if plan:
            waits = reason == "replicas" and covered and present < sum(plan.counts.values())
        else:
            waits = reason is None and not covered
            reason = "replicas" if waits else reason
        if not waits:
            self._missing_since = None
            return reason
        if self._missing_since is None:
            self._missing_since = now
        return None if now - self._missing_since < _MAY_COME_BACK_S else reason

    async def _plan(self, reason: Reason, reports: Mapping[str, Report], lengths: tuple[int, ...]) -> None:
        self._missing_since = None
        observed = self._service_times(reports)
        if not observed:
            return
        now = self._clock()
        seconds = service_times(lengths, observed, self._lengths.service_s)
        self._planner.residency = self._residency(reports, lengths)
        problem = self._planner.problem(now, len(reports), seconds)
        started = time.perf_counter()
        allocation = await asyncio.to_thread(solve, problem)
        self._solve_s = time.perf_counter() - started
        plan = self._planner.adopt(now, problem, allocation, reason)
        self._planned_at = now
        logger.info("%s plan %d (%s): %s", self._service, plan.version, reason, plan.counts)
        if plan.excess:
            logger.warning(
                "%s: %d replicas cannot answer %.1f requests/s of the demand in time; add replicas",
                self._service,
                len(reports),
                plan.excess,
            )
        self._changed()

    def _residency(self, reports: Mapping[str, Report], lengths: Collection[int]) -> Residency | None:
        """None where a replica holds one runtime of one length."""
        if self._lengths.resident:
            return Residency(dict.fromkeys(lengths, 0.0), 0.0)
        return residency(self._service, lengths, list(reports.values())) if self._sets else None

    def _move(
        self,
        reports: Mapping[str, Report],
        counts: Mapping[Configuration, int],
        barred: Mapping[str, Collection[int]],
    ) -> bool:
        """The first batch of what still differs from `counts`, if any does: stop routing, drain and load, publish."""
        holds = {replica: self._configuration(report) for replica, report in reports.items()}
        busy = {replica: report["waiting"] for replica, report in reports.items()}
        longest = self._lengths.longest
        listed = _batches(holds, counts, busy, barred)
        if not listed:
            return False
        now = self._clock()
        for replica, wanted in next((each for each in listed if _covered(holds, each, longest)), listed[0]).items():
            assignment = Assignment(replica, wanted.home, lengths=wanted.lengths if self._sets else ())
            self._moving[assignment.replica] = _Move(now, asyncio.create_task(self._hold(assignment)))
        self._changed()
        return True

    def _configuration(self, report: Report) -> Configuration:
        at = home(report)
        return Configuration(at, held_lengths(report) if self._sets else (at,))

    def _wanted(self, plan: Plan) -> Mapping[Configuration, int]:
        """By home alone where that is all that can be asked for."""
        if self._sets:
            return plan.configurations
        return {Configuration(length, (length,)): count for length, count in plan.counts.items()}

    async def _hold(self, assignment: Assignment) -> None:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._slo_s + _LOAD_WITHIN_S):
                report = await self._replicas.hold(assignment)
        except OutdatedPlannerError as error:
            self.outdated = error
        except Exception as failure:
            self._failed(assignment, failure)
        else:
            self._moves += 1
            self._failures.pop(Assignment(assignment.replica, assignment.max_length), None)
            self._table.observe(assignment.replica, report)
            self._moved[assignment.replica] = self._clock(), report
        finally:
            del self._moving[assignment.replica]
            self._last_move_s = time.perf_counter() - started
            self._changed()

    def _failed(self, assignment: Assignment, failure: Exception) -> None:
        """Do not ask the replica for this length again for some time."""
        self._failed_moves += 1
        failed = Assignment(assignment.replica, assignment.max_length)
        times = self._failures[failed].times if failed in self._failures else 0
        self._failures[failed] = _Failures(times + 1, self._clock())
        reason = " ".join(str(failure).split()) or type(failure).__name__
        logger.warning(
            "%s: replica %s cannot hold %d: %s", self._service, assignment.replica, assignment.max_length, reason[-300:]
        )

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "moves": self._moves,
            "failed_moves": self._failed_moves,
            "last_move_s": round(self._last_move_s, 3),
            "lengths": list(self._lengths.current),
        }
        if (wanted := self.wanted()) is not None:
            facts["wanted_replicas"] = wanted
        plan = self._planner.plan
        if plan:
            facts |= {
                "version": plan.version,
                "reason": plan.reason,
                "age_s": round(self._clock() - self._planned_at, 1),
                "solve_s": round(self._solve_s, 4),
                "replicas": {str(length): count for length, count in plan.counts.items()},
                "demand_per_s": {str(length): round(rate, 2) for length, rate in plan.demand.items()},
                **plan.predicted,
                "excess_per_s": round(plan.excess, 2),
            }
        return facts


def _batches(
    holds: Mapping[str, Configuration],
    counts: Mapping[Configuration, int],
    busy: Mapping[str, int],
    barred: Mapping[str, Collection[int]],
) -> list[dict[str, Configuration]]:
    """`batches` of configurations, which are numbered for it: those with longer runtimes are greater."""
    known = sorted({*holds.values(), *counts}, key=lambda each: (each.lengths[-1:], each.lengths, each.home))
    number = {each: place if each.home else 0 for place, each in enumerate(known, 1)}
    barred_numbers = {
        replica: [number[each] for each in counts if not lengths.isdisjoint(each.lengths)]
        for replica, lengths in ((replica, frozenset(each)) for replica, each in barred.items())
    }
    found = batches(
        {replica: number[each] for replica, each in holds.items()},
        {number[each]: count for each, count in counts.items()},
        busy,
        barred_numbers,
    )
    return [{replica: known[place - 1] for replica, place in batch.items()} for batch in found]


def _covered(holds: Mapping[str, Configuration], moving: Collection[str], longest: int) -> bool:
    """Whether texts of `longest` tokens still have a replica while others move, if they have one now."""
    holders = {replica for replica, each in holds.items() if longest in each.lengths}
    return not holders or not holders <= set(moving)


def _usable(
    lengths: Collection[int], reports: Mapping[str, Report], barred: Mapping[str, Collection[int]]
) -> tuple[int, ...]:
    """The lengths that plans may use: those that some replica holds, or that few enough failed to load lately."""
    number, share = _ENOUGH_FAILURES
    enough = min(max(number, math.ceil(share * len(reports))), len(reports))
    held = set().union(*({home(report), *held_lengths(report)} for report in reports.values()))
    return tuple(
        length
        for length in sorted(lengths)
        if length in held or sum(length in barred[replica] for replica in reports) < enough
    )
