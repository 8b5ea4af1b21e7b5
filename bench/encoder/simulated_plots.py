"""Plots of the simulated comparison, each named for the figure of the Arlo paper that it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot

from pliant.simulation.encoder.outcome import Outcome, plot_allocation


def cdfs(panels: Mapping[str, Mapping[str, Outcome]]) -> Plot:
    """The share of requests that each scheme answered within a time, one panel for each setting (Figures 6, 10, 11)."""
    plot, rows = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), sharey=True, squeeze=False)
    for axes, (title, outcomes) in zip(rows[0], panels.items(), strict=True):
        for name, outcome in outcomes.items():
            seconds, shares = outcome.latencies.cdf()
            axes.plot(seconds * 1e3, shares, label=name)
        axes.set(title=title, xlabel="latency (ms)", xscale="log")
        axes.legend()
    rows[0][0].set_ylabel("share of requests")
    return plot


def sweep(rates: Sequence[float], means: Mapping[str, Sequence[float]], slo_s: float) -> Plot:
    """Mean latency against load (Figure 7)."""
    plot, axes = plt.subplots(figsize=(6, 4))
    for name, seconds in means.items():
        axes.plot(rates, np.array(seconds) * 1e3, marker="o", label=name)
    axes.axhline(slo_s * 1e3, color="grey", linestyle=":", label="SLO")
    axes.set(xlabel="requests/s", ylabel="mean latency (ms)", yscale="log")
    axes.legend()
    return plot


def replicas_over_time(outcomes: Mapping[str, Outcome]) -> Plot:
    """GPUs that each scheme's autoscaling occupied (Figure 8)."""
    plot, axes = plt.subplots(figsize=(7, 4))
    for name, outcome in outcomes.items():
        minutes = np.arange(len(outcome.running)) / 60
        axes.step(minutes, outcome.running, where="post", label=f"{name}, {outcome.gpus:.2f} on average")
    axes.set(xlabel="minutes", ylabel="GPUs", ylim=(0, None))
    axes.legend()
    return plot


def allocation_over_time(outcome: Outcome) -> Plot:
    """Replicas of each max_length (Figure 12)."""
    plot, axes = plt.subplots(figsize=(7, 4))
    plot_allocation(axes, outcome)
    return plot
