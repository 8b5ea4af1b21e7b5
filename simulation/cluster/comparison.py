"""What came of one trace under several policies: a table, a plot, and figures for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot
from rich.table import Table

from pliant.simulation.cluster.simulator import Outcome


def table(outcomes: Mapping[str, Outcome]) -> Table:
    """By policy, and below each by service."""
    drawn = Table("policy", "service", "attainment", "shed", "GPU hours", "moves an hour")
    for name, outcome in outcomes.items():
        hours, shed = outcome.seconds / 3600, sum(outcome.asked.values()) - sum(outcome.answered.values())
        totals = f"{outcome.attainment:.2%}", f"{shed:,.0f}", f"{outcome.gpu_hours:,.1f}"
        drawn.add_row(name, "all", *totals, f"{outcome.moves_per_hour:.1f}", style="bold")
        for service, share in _attainments(outcome).items():
            refused = outcome.asked[service] - outcome.answered[service]
            drawn.add_row("", service, f"{share:.2%}", f"{refused:,.0f}", "", f"{outcome.moves[service] / hours:.1f}")
    return drawn


def figures(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """The same by policy, with the reasons for what changed."""
    return {
        name: {
            "attainment": outcome.attainment,
            "gpu_hours": outcome.gpu_hours,
            "moves_per_service_and_hour": outcome.moves_per_hour,
            "services": {
                service: {
                    "attainment": share,
                    "requests": outcome.asked[service],
                    "shed": outcome.asked[service] - outcome.answered[service],
                    "moves": outcome.moves[service],
                }
                for service, share in _attainments(outcome).items()
            },
            "changes": [{"second": now, "change": reason} for now, reason in outcome.reasons],
        }
        for name, outcome in outcomes.items()
    }


def plot(outcomes: Mapping[str, Outcome]) -> Plot:
    """Attainment by service and policy."""
    drawn, axes = plt.subplots(figsize=(8, 4))
    names = list(next(iter(outcomes.values())).earned)
    width = 0.8 / len(outcomes)
    for at, (name, outcome) in enumerate(outcomes.items()):
        places = np.arange(len(names)) + width * (at - (len(outcomes) - 1) / 2)
        axes.bar(places, list(_attainments(outcome).values()), width, label=name)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("of what could be earned")
    axes.legend()
    return drawn


def _attainments(outcome: Outcome) -> dict[str, float]:
    return {name: earned / (outcome.possible[name] or 1.0) for name, earned in outcome.earned.items()}
