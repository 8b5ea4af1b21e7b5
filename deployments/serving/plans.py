"""How the planner shares one budget out, as a table: for `pliant plan` and the console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pliant.deployments.serving.panels import Table

_COLUMNS = (
    "service",
    "replicas",
    "wanted",
    "demand/s",
    "foreseen in time",
    "one more would add",
    "a start takes",
    "why",
)
_NOTED = 1.05
"""The least correction that is worth a word."""


def shares(views: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each service that has a part in the budget. `views` are as /stats has them, by service."""
    plans = {name: view["plan"] for name, view in views.items() if "wanted_because" in view["plan"]}
    rows = [
        (
            name,
            str(len(views[name]["replicas"])),
            str(plan["wanted_replicas"]),
            *_judged(plan.get("budget")),
            plan["wanted_because"],
        )
        for name, plan in plans.items()
    ]
    return Table("One budget: who gets how many replicas, and why", _COLUMNS, rows)


def demand_of_others(views: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each service that sends requests on to another, such as a cascade to its levels."""
    return [
        f"{name}: {rate:.2f} of its requests per second were {other}'s, in the last minute"
        for name, view in views.items()
        for other, rate in view["plan"].get("budget", {}).get("of_these_by", {}).items()
    ]


def corrections(views: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each service that did less in time than was foreseen of it."""
    budgets = {name: view["plan"].get("budget", {}) for name, view in views.items()}
    found = {
        name: corrected(each.get("measured_in_time"), each.get("correction", 1.0)) for name, each in budgets.items()
    }
    return [f"{name}: {said}" for name, said in found.items() if said]


def corrected(measured: float | None, factor: float) -> str:
    """What to say of a service of whose requests a share was in time, and whose demand counts for that by `factor`;
    empty: nothing."""
    if measured is None or factor < _NOTED:
        return ""
    return f"{measured:.0%} of its last requests were in time, so its demand counts {factor:.1f} times"


def _judged(budget: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    """What is known once the planner has decided on the service."""
    if budget is None:
        return "", "", "", ""
    start = f"{budget['start_s']:.0f} s" if budget["start_measured"] else f"{budget['start_s']:.0f} s?"
    return f"{budget['demand_per_s']:.2f}", f"{budget['in_time']:.1%}", f"{budget['one_more']:.1%}", start
