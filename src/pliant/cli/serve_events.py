"""What `pliant serve` shows of a cluster: a row for each service, and events.

Both follow from what the gateway's /stats and Serve say from one second to the next; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_SHED = "shed"
_CALM_S = 10.0
"""Shedding is over when nothing was shed for so long."""
_LONG_S = 90.0
"""A gateway usually answers in a third of it, on a busy machine, too."""


@dataclass(frozen=True)
class Snapshot:
    """What is known of the cluster at one moment."""

    at_s: float
    """Since the start."""
    phase: str
    """What is done before the gateway answers."""
    stats: Mapping[str, Any] = field(default_factory=dict)
    """As /stats has it; empty until the gateway answers."""
    refused: bool = False
    """The gateway answers, but not without a key."""
    deployments: Mapping[str, Any] = field(default_factory=dict)
    """By name, as `deployments/run.py` writes it."""


@dataclass(frozen=True)
class Row:
    """One service."""

    name: str
    kind: str
    state: str
    done: float | None
    """The share of what it does that is done, if that is known."""
    ready: bool


def rows(snapshot: Snapshot, kinds: Mapping[str, str]) -> list[Row]:
    """A row for each of the services, whose `kinds` are known by name."""
    states = snapshot.stats.get("services", {})
    found = []
    for name, kind in kinds.items():
        state = states.get(name, {})
        failure = _failure(snapshot.deployments.get(name, {}))
        text = failure or state.get("state") or snapshot.phase
        found.append(Row(name, kind, text, state.get("done"), bool(state.get("ready"))))
    return found


class Story:
    """Tells what happens, each thing once."""

    def __init__(self, examples: Mapping[str, str]) -> None:
        """`examples` are the lines with which a service, once ready, can be tried."""
        self._examples = examples
        self._answered = False
        """The gateway, ever."""
        self._ready: dict[str, bool] = {}
        self._reported: set[str] = set()
        self._replicas: dict[str, set[str]] = {}
        self._most: dict[str, int] = {}
        """Replicas that a service ever had."""
        self._plans: dict[str, Any] = {}
        self._backends: dict[str, dict[str, str]] = {}
        self._shed: dict[tuple[str, str], int] = {}
        self._shedding: dict[str, float] = {}

    def events(self, snapshot: Snapshot, kinds: Mapping[str, str]) -> list[str]:
        """What has happened since the last snapshot."""
        found = [*self._late(snapshot), *self._readiness(snapshot, kinds)]
        for name, replicas in _replicas(snapshot.stats).items():
            found += self._came_and_left(name, set(replicas))
            found += self._compiled(name, replicas)
        for name, view in snapshot.stats.get("services", {}).items():
            found += self._planned(name, view["plan"])
            gateway = (str(snapshot.stats.get("gateway")), name)
            found += self._refused(name, gateway, view["requests"].get(_SHED, 0), snapshot.at_s)
        return found

    def _late(self, snapshot: Snapshot) -> Iterator[str]:
        if snapshot.stats or snapshot.refused:
            self._answered = True
        elif snapshot.at_s >= _LONG_S and not self._answered and snapshot.phase not in self._reported:
            self._reported.add(snapshot.phase)
            yield f"{snapshot.phase}: nothing answers yet; the log may say why"

    def _readiness(self, snapshot: Snapshot, kinds: Mapping[str, str]) -> Iterator[str]:
        for row in rows(snapshot, kinds):
            before = self._ready.get(row.name, False)
            if row.ready and not before:
                again = row.name in self._ready
                example = "" if again or row.name not in self._examples else f"; try:\n  {self._examples[row.name]}"
                yield f"{row.name} is ready{' again' if again else ''}{example}"
            elif before and not row.ready:
                yield f"{row.name} cannot answer now: {row.state}"
            if row.ready or before:
                self._ready[row.name] = row.ready
            if (failure := _failure(snapshot.deployments.get(row.name, {}))) and failure not in self._reported:
                self._reported.add(failure)
                yield f"{row.name} {failure}"

    def _came_and_left(self, name: str, replicas: set[str]) -> Iterator[str]:
        before = self._replicas.get(name, set())
        self._replicas[name] = replicas
        most = self._most.get(name, 0)
        self._most[name] = max(most, len(replicas))
        for left in sorted(before - replicas):
            yield f"{name}: replica {left} has left; {len(replicas)} run"
        for came in sorted(replicas - before):
            if most >= len(replicas):  # not those of the start
                yield f"{name}: replica {came} has come; {len(replicas)} run"

    def _compiled(self, name: str, replicas: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        for report in replicas.values():
            for reason in report.get("uncompiled", {}).values():
                if reason not in self._reported:
                    self._reported.add(reason)
                    yield f"{name}: {reason}"
        before = self._backends.get(name, {})
        now = {replica: report["backend"] for replica, report in replicas.items() if report.get("backend")}
        for backend in sorted({now[replica] for replica in now if before.get(replica) == "eager"} - {"eager"}):
            yield f"{name}: {list(now.values()).count(backend)} of {len(now)} replicas compute on {backend}"
        self._backends[name] = before | now
        for reason in dict.fromkeys(report["reason"] for report in replicas.values() if report.get("reason")):
            if (event := f"{name}: {reason}") not in self._reported:
                self._reported.add(event)
                yield event

    def _planned(self, name: str, plan: Mapping[str, Any]) -> Iterator[str]:
        version, known = plan.get("version"), self._plans.get(name)
        self._plans[name] = version
        if version in (None, known) or (plan["reason"] == "replicas" and not self._ready.get(name)):
            return
        counts = ", ".join(f"{count} for {length} tokens" for length, count in plan["replicas"].items() if count)
        yield f"{name}: plan {version} ({plan['reason']}): {counts}"

    def _refused(self, name: str, gateway: tuple[str, str], shed: int, now: float) -> Iterator[str]:
        more = shed - self._shed.get(gateway, 0)
        self._shed[gateway] = shed
        if more > 0:
            if name not in self._shedding:
                yield f"{name} refuses requests that it cannot answer in time"
            self._shedding[name] = now
        elif name in self._shedding and now - self._shedding[name] >= _CALM_S:
            del self._shedding[name]
            yield f"{name} refuses no more"


def _replicas(stats: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The reports of replicas, by service and replica."""
    return {name: view["replicas"] for name, view in stats.get("services", {}).items()}


def _failure(deployment: Mapping[str, Any]) -> str | None:
    """Why Serve has given the deployment up, in one line."""
    if deployment.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"):
        return None
    lines = [line.strip() for line in str(deployment.get("message", "")).splitlines() if line.strip()]
    return f"failed: {lines[-1] if lines else 'Serve does not say why; the log may'}"
