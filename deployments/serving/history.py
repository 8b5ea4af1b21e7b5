"""What one gateway remembers for its console: numbers of each service, of all gateways, over the last quarter of an
hour, and events.

Plain Python. `now` is in Unix seconds; views of services are as /stats has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pliant.dashboards.rules import OBJECTIVE
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.panels import Chart, Panel, Readings

STEP_S = 5.0
"""How often `record` is called."""
STEPS = 180
MINUTE = round(60 / STEP_S)
_EVENTS = 100

GOOD = (Outcome.OK, Outcome.DEGRADED)
REFUSED = (Outcome.SHED, Outcome.TOO_LATE)
FAILED = (Outcome.UNAVAILABLE, Outcome.FAILED)
MISSED = (*REFUSED, *FAILED)
"""Outcomes that are the service's fault; what clients sent wrong, or left, is not."""


class Event(NamedTuple):
    """Something that happened."""

    at: float
    service: str
    """Empty: the cluster."""
    what: str
    bad: bool = False


class Past:
    """The numbers of one service, by name."""

    def __init__(self, steps: Sequence[Mapping[str, float]]) -> None:
        self._steps = steps

    def line(self, name: str) -> list[float]:
        """Its values since this began, `STEPS` at most, newest last; 0 where it was not there."""
        return [step.get(name, 0.0) for step in self._steps]

    def lines(self, prefix: str) -> dict[str, list[float]]:
        """All whose names begin with `prefix`, by what follows it."""
        names = {name.removeprefix(prefix) for step in self._steps for name in step if name.startswith(prefix)}
        return {name: self.line(f"{prefix}{name}") for name in sorted(names, key=_natural)}

    def attained(self, steps: int) -> float | None:
        """The share of requests in the last `steps` that were answered in time; None without any."""
        good = sum(sum(self.line(f"requests/{outcome}")[-steps:]) for outcome in GOOD)
        missed = sum(sum(self.line(f"requests/{outcome}")[-steps:]) for outcome in MISSED)
        return good / (good + missed) if good + missed else None


class Shows(Protocol):
    """What a kind shows: see `kind.Kind`."""

    @property
    def answers(self) -> str: ...

    def readings(self, report: Mapping[str, Any]) -> Readings: ...

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]: ...


class History:
    """What is remembered of services of these `kinds`, by name."""

    def __init__(self, kinds: Mapping[str, Shows]) -> None:
        self.kinds = kinds
        self.events: deque[Event] = deque(maxlen=_EVENTS)
        """Newest last."""
        self._steps: dict[str, deque[Mapping[str, float]]] = {}
        self._counted: dict[tuple[str, str, str], float] = {}
        """What counters stood at, by service, replica or gateway, and key. A gateway has one more, without a name and
        always 0: what it had not counted when it was last looked at was 0, what a replica had not is not known."""
        self._at: float | None = None
        self._views: Mapping[str, Mapping[str, Any]] = {}
        self._planner_reached = True

    def record(self, now: float, stats: Mapping[str, Any]) -> None:
        """Take in what is so at `now`."""
        views: Mapping[str, Mapping[str, Any]] = stats["services"]
        passed_s = now - self._at if self._at is not None else 0.0
        before, self._counted = self._counted, {}
        for service, view in views.items():
            steps = self._steps.setdefault(service, deque(maxlen=STEPS))
            steps.append(self._values(service, view, before, passed_s))
            if service in self._views:
                self.events.extend(_happened(now, service, self._views[service], view))
        if self._planner_reached != stats["planner_reached"]:
            self._planner_reached = stats["planner_reached"]
            reached = "answers again" if self._planner_reached else "cannot be reached; all goes on as it was"
            self.events.append(Event(now, "", f"the planner {reached}", not self._planner_reached))
        self._at = now
        self._views = {service: _kept(view) for service, view in views.items()}

    def of(self, service: str) -> Past:
        """What is remembered of `service`."""
        return Past(list(self._steps.get(service, ())))

    def shortfalls(self) -> list[str]:
        """Services that answered too few of the last minute's requests in time; the worst first."""
        shares = {service: self.of(service).attained(MINUTE) for service in self._views}
        missed = sorted((share, name) for name, share in shares.items() if share is not None and share < OBJECTIVE)
        return [f"{name} answered {share:.1%} of the last minute's requests in time" for share, name in missed]

    def _values(
        self, service: str, view: Mapping[str, Any], before: Mapping[tuple[str, str, str], float], passed_s: float
    ) -> dict[str, float]:
        running = len(view["replicas"])
        values: dict[str, float] = {"replicas": float(running), "gpus": running * view.get("gpus", 0.0)}
        counters = [
            (gateway, outcome, f"requests/{outcome}", count)
            for gateway, requests in view["requests_by_gateway"].items()
            for outcome, count in requests.items()
        ]
        self._counted |= {(service, gateway, ""): 0.0 for gateway in view["requests_by_gateway"]}
        kind = self.kinds[view["kind"]]
        for replica, report in view["replicas"].items():
            readings = kind.readings(report)
            for name, level in readings.levels.items():
                values[name] = values.get(name, 0.0) + level
            counters += [(replica, key, name, count) for key, (name, count) in readings.counters.items()]
        for source, key, name, count in counters:
            self._counted[service, source, key] = count
            began = before.get((service, source, key), before.get((service, source, ""), count))
            grown = max(0.0, count - began) / passed_s if passed_s > 0 else 0.0
            values[name] = values.get(name, 0.0) + grown
        return values


def tenants(report: Mapping[str, Any]) -> dict[str, float]:
    """A replica's work that waits, by tenant, as `of_tenants` finds it."""
    return {f"tenants/{tenant}": float(work) for tenant, work in report.get("tenants", {}).items()}


def of_tenants(past: Past, title: str, unit: str = "") -> Iterator[Chart]:
    """What waits, by tenant, where there are several."""
    lines = past.lines("tenants/")
    if len(lines) > 1:
        yield Chart(f"{title}, by tenant", lines, unit, stacked=True)


def troubles(stats: Mapping[str, Any]) -> list[str]:
    """What is wrong, by what /stats says; the worst first."""
    wrong = [] if stats["planner_reached"] else ["the planner cannot be reached"]
    for name, view in stats["services"].items():
        if not view["ready"]:
            wrong.append(f"{name} is not ready: {view['state']}")
        ejected = [replica for replica, report in view["replicas"].items() if report.get("ejected")]
        wrong += [f"{name}: replica {replica} fails" for replica in ejected]
        apart = [replica for replica, report in view["replicas"].items() if report.get("line") == "failed"]
        wrong += [
            f"{name}: replica {replica} is called through Ray, for its port cannot be reached" for replica in apart
        ]
        wrong += [str(problem) for problem in view.get("problems", [])]
        wrong += [f"{name}: {view['problem']}"] if view.get("problem") else []
        wrong += view.get("warnings", [])
    return wrong


def _kept(view: Mapping[str, Any]) -> dict[str, Any]:
    """What events are found by, of a view whose parts may change."""
    plan = view["plan"]
    replicas = {name: {"ejected": report.get("ejected", False)} for name, report in view["replicas"].items()}
    return {"ready": view["ready"], "state": view["state"], "replicas": replicas, "plan": {**plan}}


def _happened(now: float, service: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Event]:
    had, has = before["replicas"], after["replicas"]
    for replica in sorted(has.keys() - had.keys()):
        yield Event(now, service, f"replica {replica} runs")
    for replica in sorted(had.keys() - has.keys()):
        yield Event(now, service, f"replica {replica} has left", bad=True)
    for replica in sorted(had.keys() & has.keys()):
        if had[replica]["ejected"] != (ejected := has[replica].get("ejected", False)):
            said = "failed too often, and is left alone for a while" if ejected else "is asked again"
            yield Event(now, service, f"replica {replica} {said}", bad=ejected)
    if before["ready"] != after["ready"]:
        yield Event(
            now, service, after["state"] if after["ready"] else f"not ready: {after['state']}", not after["ready"]
        )
    plan, old = after["plan"], before["plan"]
    if plan.get("replicas") != old.get("replicas"):
        wanted = ", ".join(f"{count} at {length}" for length, count in plan.get("replicas", {}).items() if count)
        yield Event(now, service, f"new plan ({plan.get('reason', 'start')}): replicas by home length: {wanted}")
    before_that, wanted_now = old.get("wanted_replicas"), plan.get("wanted_replicas")
    if None not in (before_that, wanted_now) and before_that != wanted_now:
        why = f": {plan['wanted_because']}" if plan.get("wanted_because") else ""
        yield Event(now, service, f"{before_that} → {wanted_now} replicas wanted{why}")


def _natural(name: str) -> tuple[float, str]:
    """Numbers by value, and before words."""
    try:
        return float(name), ""
    except ValueError:
        return float("inf"), name
