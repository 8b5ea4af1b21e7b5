"""Recording and alerting rules for Prometheus. docs/incidents.md has a section for each alert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

OBJECTIVE: Final = 0.99
"""Share of requests to be answered within their SLO, over 30 days."""

_WINDOWS = ("5m", "30m", "1h", "6h")
_BAD = 'outcome=~"shed|too_late|failed|unavailable"'
_COUNTED = 'outcome!~"rejected|cancelled"'


@dataclass(frozen=True)
class Recording:
    name: str
    expression: str

    def as_yaml(self) -> dict[str, Any]:
        return {"record": self.name, "expr": self.expression}


@dataclass(frozen=True)
class Alert:
    """`severity` "page" wakes somebody up, "ticket" waits for the morning."""

    name: str
    expression: str
    lasts: str
    """For how long before it fires."""
    severity: Literal["page", "ticket"]
    summary: str

    @property
    def section(self) -> str:
        """The anchor of its section in docs/incidents.md."""
        return self.name.lower()

    def as_yaml(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"docs/incidents.md#{self.section}"},
        }


def _bad_share(window: str) -> str:
    """Of requests that were to be answered: not, or late. Without a request, nothing."""
    bad = f"sum by (service, kind) (rate(ray_pliant_requests_total{{{_BAD}}}[{window}]))"
    late = f"sum by (service, kind) (rate(ray_pliant_slo_violations_total[{window}]))"
    counted = f"sum by (service, kind) (rate(ray_pliant_requests_total{{{_COUNTED}}}[{window}]))"
    return f"(({bad} or 0 * {counted}) + ({late} or 0 * {counted})) / ({counted} > 0)"


def _burns(short: str, long: str, times: float) -> str:
    """Both windows spend the budget that many times too fast: the long one shows it is real, the short one that it goes
    on."""
    limit = round(times * (1 - OBJECTIVE), 6)
    return f"pliant:bad:ratio_rate{short} > {limit} and pliant:bad:ratio_rate{long} > {limit}"


def _share_of(outcomes: str) -> str:
    part = f'sum by (service, kind) (rate(ray_pliant_requests_total{{outcome=~"{outcomes}"}}[5m]))'
    return f"{part} / sum by (service, kind) (rate(ray_pliant_requests_total[5m]))"


def _statuses(status: str = ".*", but: str = "") -> str:
    return f'sum(rate(ray_pliant_tenant_requests_total{{status=~"{status}", status!~"{but}"}}[5m]))'


_EDGE_ERRORS = 'sum(rate(ray_pliant_edge_answers_total{status="5xx"}[5m]))'

RECORDINGS = tuple(Recording(f"pliant:bad:ratio_rate{window}", _bad_share(window)) for window in _WINDOWS)

ALERTS = (
    Alert(
        "PliantSloBurnsFast",
        _burns("5m", "1h", 14.4),
        "2m",
        "page",
        "{{ $labels.service }}: {{ $value | humanizePercentage }} of requests refused, failed or late; "
        "the month's budget is gone in two days",
    ),
    Alert(
        "PliantSloBurns",
        _burns("30m", "6h", 6),
        "15m",
        "ticket",
        "{{ $labels.service }}: {{ $value | humanizePercentage }} of requests refused, failed or late for hours",
    ),
    Alert(
        "PliantSheds",
        f"{_share_of('shed')} > 0.05",
        "5m",
        "ticket",
        "{{ $labels.service }} refuses {{ $value | humanizePercentage }} of its requests for lack of room",
    ),
    Alert(
        "PliantErrors",
        f"{_share_of('failed|unavailable')} > 0.01",
        "2m",
        "page",
        "{{ $labels.service }} fails {{ $value | humanizePercentage }} of its requests",
    ),
    Alert(
        "PliantServerErrors",
        f"{_statuses('5..', but='503|504')} / {_statuses()} > 0.005",
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of HTTP requests end in a server error",
    ),
    Alert(
        "PliantEdgeErrors",
        f"{_EDGE_ERRORS} / (({_statuses()} or vector(0)) + {_EDGE_ERRORS}) > 0.005",
        "5m",
        "page",
        "{{ $value | humanizePercentage }} of HTTP requests end in an error of HAProxy's own: no gateway answers them",
    ),
    Alert(
        "PliantNotReady",
        "pliant_service_ready == 0",
        "10m",
        "page",
        "{{ $labels.service }} cannot answer",
    ),
    Alert(
        "PliantNoReplica",
        "pliant_service_replicas == 0 and pliant_service_ready == 0",
        "5m",
        "page",
        "{{ $labels.service }} has no replica",
    ),
    Alert(
        "PliantReplicaLeftAlone",
        "pliant_service_replicas_ejected > 0",
        "5m",
        "ticket",
        "{{ $value }} replicas of {{ $labels.service }} fail again and again",
    ),
    Alert("PliantGatewayAway", 'up{job="pliant"} == 0', "1m", "page", "no gateway answers at {{ $labels.instance }}"),
    Alert("PliantPlannerAway", "pliant_planner_reached == 0", "2m", "ticket", "the planner does not answer"),
    Alert(
        "PliantNodeMemory",
        "ray_node_mem_used / ray_node_mem_total > 0.92",
        "10m",
        "page",
        "node {{ $labels.ip }} uses {{ $value | humanizePercentage }} of its memory; Ray kills replicas at 95%",
    ),
    Alert(
        "PliantTooFewReplicas",
        "sum by (service) (pliant_plan_excess_requests_per_second) > 0",
        "10m",
        "ticket",
        "{{ $labels.service }}: {{ $value }} requests a second more than its replicas can answer in time",
    ),
    Alert(
        "PliantMovesFail",
        "sum by (service) (increase(pliant_failed_moves_total[30m])) > 3",
        "0m",
        "ticket",
        "replicas of {{ $labels.service }} cannot be given another length",
    ),
    Alert(
        "PliantCascadeDrifts",
        "max by (service) (pliant_cascade_reroute_drifting or pliant_cascade_answers_drifting) > 0",
        "15m",
        "ticket",
        "{{ $labels.service }} sends on another share of its texts than profiled, or is wrong more often",
    ),
    Alert(
        "PliantProblems",
        "pliant_service_problems > 0",
        "10m",
        "ticket",
        "{{ $labels.service }} has {{ $value }} adapters, tasks or promises that need a person",
    ),
)


def as_yaml() -> dict[str, Any]:
    """A file of rules."""
    return {
        "groups": [
            {"name": "pliant.recording", "rules": [each.as_yaml() for each in RECORDINGS]},
            {"name": "pliant.alerts", "rules": [each.as_yaml() for each in ALERTS]},
        ]
    }
