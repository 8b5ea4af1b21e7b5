"""`pliant plan`: how a running cluster shares its budget out."""

from __future__ import annotations

from rich.table import Table

from pliant.cli.terminal import console
from pliant.cli.top import ask, observer
from pliant.errors import PliantError


def show(url: str) -> None:
    """Print what the planner of the cluster at `url` last decided, and why.

    Raises PliantError if the cluster does not answer, or has no budget to share.
    """
    with observer(url) as http:
        services = ask(http, url)["services"]
    plans = {name: view["plan"] for name, view in services.items() if "budget" in view["plan"]}
    if not plans:
        raise PliantError(
            f"{url} has shared no budget out yet: it does if cluster.yaml has `budget: {{}}`, a minute after the "
            "start, between services with replicas: {min: 1, max: 4} that were asked for something"
        )
    table = Table("service", "replicas", "wanted", "demand/s", "in time", "one more would add", "why")
    for name, plan in plans.items():
        budget = plan["budget"]
        table.add_row(
            name,
            str(len(services[name]["replicas"])),
            str(plan["wanted_replicas"]),
            f"{budget['demand_per_s']:.2f}",
            f"{budget['in_time']:.1%}",
            f"{budget['one_more']:.1%}",
            plan["wanted_because"],
        )
    console.print(table)
    for problem in {plan["budget"]["problem"] for plan in plans.values()} - {""}:
        console.print(problem, style="red", markup=False)
