"""Plots of the comparison, each named for the figure of the Flover paper that it repeats.

Times are in units of what one request takes alone, 5.8 s on the paper's server.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot

from pliant.bench.findings import Outcomes, mean_latencies, tokens_per_s, totals
from pliant.bench.llm.workload import PAPER_SOLO_MS

_UNIT = "times of one request alone"


def concurrency(outcomes: Mapping[int, Outcomes], solo_s: float) -> Plot:
    """Total latency, throughput and mean latency against the number of requests (Figure 4)."""
    plot, (total, throughput, latency) = plt.subplots(1, 3, figsize=(15, 4))
    counts = list(outcomes)
    for system in outcomes[counts[0]]:
        runs = [outcomes[count][system] for count in counts]
        total.plot(counts, [statistics.median(totals(run)) / solo_s for run in runs], marker="o", label=system)
        throughput.plot(counts, [tokens_per_s(run) for run in runs], marker="o", label=system)
        latency.plot(
            counts, [statistics.median(mean_latencies(run)) / solo_s for run in runs], marker="o", label=system
        )
    total.set(title="(a) total latency", ylabel=_UNIT, yscale="log")
    throughput.set(title="(b) throughput", ylabel="tokens/s")
    latency.set(title="(c) mean latency of a request", ylabel=_UNIT, yscale="log")
    for axes in (total, throughput, latency):
        axes.set(xlabel="requests", xscale="log", xticks=counts)
        axes.xaxis.set_major_formatter("{x:g}")
    total.legend()
    return plot


def arrivals(outcomes: Mapping[int, Outcomes], solo_s: float) -> Plot:
    """Total latency by the mean time between arrivals, in the paper's ms, and the overlap of ours (Figure 5)."""
    plot, axes = plt.subplots(figsize=(9, 4))
    places = np.arange(len(outcomes))
    systems = list(next(iter(outcomes.values())))
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        seconds = [statistics.median(totals(by_system[system])) / solo_s for by_system in outcomes.values()]
        axes.bar(places + number * width, seconds, width, label=system)
    axes.set(xlabel=f"λ (ms, where one request takes {PAPER_SOLO_MS})", ylabel=f"total latency ({_UNIT})", yscale="log")
    axes.set_xticks(places + 0.4 - width / 2, [str(mean_ms) for mean_ms in outcomes])
    axes.legend()
    overlap = axes.twinx()
    shares = [statistics.median(run.overlap for run in by_system[systems[0]]) for by_system in outcomes.values()]
    overlap.plot(places + 0.4 - width / 2, np.array(shares) * 100, color="goldenrod", marker="o")
    overlap.set(ylabel=f"overlap of {systems[0]} (%)", ylim=(0, 100))
    return plot


def ranges(outcomes: Mapping[int, Outcomes], shortest: int, solo_s: float) -> Plot:
    """Total latency against the upper bound of the lengths (Figure 6)."""
    plot, axes = plt.subplots(figsize=(6, 4))
    for system in next(iter(outcomes.values())):
        seconds = [statistics.median(totals(by_system[system])) / solo_s for by_system in outcomes.values()]
        axes.plot(list(outcomes), seconds, marker="o", label=system)
    axes.set(xlabel=f"b, lengths are U({shortest}, b)", ylabel=f"total latency ({_UNIT})", yscale="log")
    axes.legend()
    return plot


def progress(outcomes: Outcomes, solo_s: float) -> Plot:
    """How many tokens there are over time (Figure 7)."""
    plot, axes = plt.subplots(figsize=(7, 4))
    for system, runs in outcomes.items():
        seconds, tokens = runs[0].progress()
        axes.plot(seconds / solo_s, tokens, label=system)
    axes.set(xlabel=f"time ({_UNIT})", ylabel="tokens")
    axes.legend()
    return plot
