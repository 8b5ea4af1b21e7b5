"""A picture of a cascade's profile: what each candidate's accuracy costs in latency."""

from __future__ import annotations

from pathlib import Path

from pliant.deployments.cascade.table import CascadeTable
from pliant.policies.cascade.candidates import Candidate, front


def plot(table: CascadeTable, path: Path, chosen: Candidate | None = None) -> None:
    """Write a picture of the candidates, of the best of them, and of the one that is `chosen`, as PNG."""
    from matplotlib.figure import Figure  # takes most of a second, and only this function needs it

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    kinds = {
        "one model": [one for one in table.candidates if len(one.levels) == 1],
        "cascade": [one for one in table.candidates if len(one.levels) > 1 and not any(one.alphas)],
        "cascade, pruned texts": [one for one in table.candidates if any(one.alphas)],
    }
    for (label, found), marker, size in zip(kinds.items(), "so^", (60, 12, 12), strict=True):
        x, y = _places(found)
        axes.scatter(x, y, label=label, marker=marker, s=size, alpha=1 if label == "one model" else 0.4)
    axes.plot(*_places(front(table.candidates)), color="black", linewidth=1, label="none is better in both")
    for one in kinds["one model"]:
        place = 1e3 * one.mean_latency_s, 100 * one.accuracy
        axes.annotate(str(one), place, xytext=(6, -10), textcoords="offset points")
    if chosen:
        axes.scatter(*_places([chosen]), marker="*", s=220, color="red", zorder=3, label=f"chosen: {chosen}")
    axes.set(
        title=f"candidates on {table.texts} texts",
        xlabel="mean latency (ms)",
        ylabel="accuracy (%)",
        xlim=(0, None),
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _places(candidates: list[Candidate]) -> tuple[list[float], list[float]]:
    return [1e3 * one.mean_latency_s for one in candidates], [100 * one.accuracy for one in candidates]
