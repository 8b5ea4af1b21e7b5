"""`pliant plan`: how a running cluster shares its budget out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pliant.cli.terminal import console
from pliant.cli.top import ask, client
from pliant.errors import PliantError


def show(url: str) -> None:
    """Print what the planner of the cluster at `url` last decided, and why.

    Raises PliantError if the cluster does not answer, or has no budget to share.
    """
    with client(url) as http:
        services = ask(http, url)["services"]
    plans = {name: view["plan"] for name, view in services.items() if "wanted_because" in view["plan"]}
    if not plans:
        raise PliantError(
            f"{url} shares no budget out: write `budget: {{}}` into cluster.yaml, beside services with replicas: "
            "{min: 1, max: 4}"
        )
    table = Table("service", "replicas", "wanted", "demand/s", "in time", "one more would add", "a start takes", "why")
    for name, plan in plans.items():
        table.add_row(
            name,
            str(len(services[name]["replicas"])),
            str(plan["wanted_replicas"]),
            *_judged(plan.get("budget")),
            plan["wanted_because"],
        )
    console.print(table)
    for name, plan in plans.items():
        for other, rate in plan.get("budget", {}).get("of_these_by", {}).items():
            console.print(f"{name}: {rate:.2f} of its requests per second were {other}'s, in the last minute")


def _judged(budget: Mapping[str, Any] | None) -> tuple[str, str, str, str]:
    """What is known once the planner has decided on the service."""
    if budget is None:
        return "", "", "", ""
    start = f"{budget['start_s']:.0f} s" if budget["start_measured"] else f"{budget['start_s']:.0f} s?"
    return f"{budget['demand_per_s']:.2f}", f"{budget['in_time']:.1%}", f"{budget['one_more']:.1%}", start
