"""`pliant plan`: how a running cluster shares its budget out."""

from __future__ import annotations

from pliant.cli.terminal import console
from pliant.cli.top import ask, client, drawn
from pliant.deployments.serving.plans import corrections, demand_of_others, shares
from pliant.errors import PliantError


def show(url: str) -> None:
    """Print what the planner of the cluster at `url` last decided, and why.

    Raises PliantError if the cluster does not answer, or has no budget to share.
    """
    with client(url) as http:
        views = ask(http, url)["services"]
    table = shares(views)
    if not table.rows:
        raise PliantError(
            f"{url} shares no budget out: write `budget: {{}}` into cluster.yaml, beside services with replicas: "
            "{min: 1, max: 4}"
        )
    console.print(drawn(table))
    for line in (*demand_of_others(views), *corrections(views)):
        console.print(line)
