"""Plots of the live runs, each named for the figure of the OTAS paper that it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot

_TYPES = ("1: right, in time", "2: wrong, in time", "3: late", "4: evicted")


def gammas(loads: Sequence[float], answers: Sequence[tuple[float, int]]) -> Plot:
    """The load by second, and the gamma of each answer, over time (Figures 8 and 12)."""
    plot, load = plt.subplots(figsize=(8, 4))
    load.stairs(loads, np.arange(len(loads) + 1), color="gray")
    load.axhline(1, color="gray", linewidth=0.8, linestyle="--")
    load.set(xlabel="time (s)", ylabel="load, of the capacity at gamma 0", ylim=(0, None))
    gamma = load.twinx()
    seconds, chosen = zip(*answers, strict=True)
    gamma.scatter(seconds, chosen, s=4, color="tab:blue")
    gamma.set_ylabel("gamma", color="tab:blue")
    return plot


def types(shares: Mapping[str, Sequence[float]]) -> Plot:
    """The shares of the four types of queries, by system (Figure 13)."""
    plot, axes = plt.subplots(figsize=(8, 4))
    below = np.zeros(len(shares))
    for index, name in enumerate(_TYPES):
        heights = np.array([of_system[index] for of_system in shares.values()])
        axes.bar(list(shares), heights, bottom=below, label=name)
        below += heights
    axes.set_ylabel("share of queries")
    axes.legend()
    return plot
