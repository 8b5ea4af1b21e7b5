"""Plots of the simulated comparison, each named for the figure of the Chameleon paper that it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot

from pliant.simulation.arrivals import Floats

_TTFT = "time to first token"


def by_load(loads: Sequence[float], values: Mapping[str, Sequence[float]], what: str, slo: float | None) -> Plot:
    """A line for each system over the load, in units of X (Figures 10, 11 and 12)."""
    plot, axes = plt.subplots(figsize=(7, 4))
    for system, line in values.items():
        axes.plot(loads, line, marker="o", label=system)
    if slo is not None:
        axes.axhline(slo, color="red", linestyle="--", label="SLO")
    axes.set(xlabel="load (X: where S-LoRA's policy first violates the SLO)", ylabel=what, yscale="log")
    axes.legend()
    return plot


def slowdowns(panels: Mapping[str, Mapping[str, Floats]]) -> Plot:
    """The CDF of latency over latency alone, by load and system (Figure 7)."""
    plot, panes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False)
    for axes, (load, systems) in zip(panes[0], panels.items(), strict=True):
        for system, values in systems.items():
            axes.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), label=system)
        axes.set(title=f"{load} load", xlabel="slowdown", ylabel="share of requests", xscale="log")
        axes.legend()
    return plot


def over_time(ends: Sequence[float], values: Mapping[str, Sequence[float]]) -> Plot:
    """P99 of the time to first token of those that arrived in each window (Figures 13 and 16)."""
    plot, axes = plt.subplots(figsize=(8, 4))
    for system, line in values.items():
        axes.plot(ends, line, marker="o", label=system)
    axes.set(xlabel="time (s)", ylabel=f"P99 {_TTFT} (s)", yscale="log")
    axes.legend()
    return plot


def bars(groups: Sequence[str], values: Mapping[str, Sequence[float]], what: str) -> Plot:
    """Bars for each group, one for each system, relative to S-LoRA (Figures 14, 15, 17 and 18)."""
    plot, axes = plt.subplots(figsize=(8, 4))
    width = 0.8 / len(values)
    for index, (system, heights) in enumerate(values.items()):
        axes.bar(np.arange(len(groups)) + index * width, heights, width, label=system)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xticks(np.arange(len(groups)) + 0.4 - width / 2, groups)
    axes.set(ylabel=what)
    axes.legend()
    return plot
