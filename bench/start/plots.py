"""When each service became ready."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure as Plot

from pliant.bench.start.figures import Round
from pliant.bench.start.timeline import Timeline

_ALL = "all, and ready"


def ready(rounds: Sequence[Round]) -> Plot:
    """A row for each service and a point for each start; the line is bare Ray Serve's first answer."""
    names = [*rounds[0].first.timeline.answered, _ALL]
    rows = {name: row for row, name in enumerate(reversed(names))}
    plot, axes = plt.subplots(figsize=(8, 0.5 * len(names) + 1.5))
    for label, offset, timelines in (
        ("first start", 0.12, [one.first.timeline for one in rounds]),
        ("second start", -0.12, [one.second.timeline for one in rounds]),
    ):
        points = [(second, rows[name] + offset) for timeline in timelines for name, second in _seconds(timeline)]
        axes.scatter(*zip(*points, strict=True), label=label)
    axes.axvline(statistics.median(one.bare.timeline.first for one in rounds), color="gray", label="bare Ray Serve")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="seconds until the first answer", yticks=list(rows.values()), yticklabels=list(rows))
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.legend()
    return plot


def _seconds(timeline: Timeline) -> list[tuple[str, float]]:
    return [*timeline.answered.items(), (_ALL, timeline.ready)]
