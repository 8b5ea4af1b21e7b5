"""Plots named for the figures of the Tabi paper that they repeat."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plot

from pliant.bench.cascade import outcome
from pliant.bench.cascade.figures import ensemble_s
from pliant.bench.cascade.live import ONE_ENCODER, OURS, SINGLE, Measured
from pliant.bench.cascade.study import Studied
from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.candidates import CUTOFFS, Candidate, front
from pliant.policies.cascade.cascade import reroute_probability
from pliant.policies.encoder.confidence import confidence, softmax

_BUCKETS = 5
_ALPHAS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def evaluation(studied: Studied) -> dict[str, Plot]:
    """Figures 6 to 9, and the candidates; without a cascade to vary, fewer."""
    cascade = studied.served[0].cascade
    found = {
        f"candidates-{studied.name}": _candidates(studied),
        f"fig7-{studied.name}": _latencies(studied),
    }
    if len(cascade.levels) == 1:
        return found
    return found | {
        f"fig6-{studied.name}": _calibration(studied, cascade),
        f"fig8-{studied.name}": _cutoffs(studied, cascade),
        f"fig9-{studied.name}": _alphas(studied, cascade),
    }


def _candidates(studied: Studied) -> Plot:
    """All that were found, on the split that they are chosen on."""
    plot, axes = plt.subplots(figsize=(8, 5))
    for singles, label in ((False, "cascades"), (True, "single models")):
        some = [one for one in studied.table.candidates if (len(one.levels) == 1) == singles]
        axes.scatter(
            [1e3 * one.mean_latency_s for one in some],
            [one.accuracy for one in some],
            s=60 if singles else 6,
            marker="*" if singles else "o",
            label=label,
        )
    best = front(studied.table.candidates)
    axes.plot([1e3 * one.mean_latency_s for one in best], [one.accuracy for one in best], color="gray", linewidth=0.8)
    for served in studied.served:
        one = served.cascade
        axes.annotate(f"{served.loss:.1%} lost", (1e3 * one.mean_latency_s, one.accuracy))
    axes.set(xlabel="mean latency in ms", ylabel="accuracy, choose split", title=studied.name)
    axes.legend()
    return plot


def _calibration(studied: Studied, cascade: Candidate) -> Plot:
    """Accuracy by confidence, without and with the temperature, and the probability of going on."""
    plot, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    read = studied.test.whole[cascade.levels[0]]
    hits = studied.test.right(read)
    edges = np.linspace(1 / read.logits.shape[1], 1, _BUCKETS + 1)
    for shift, (label, temperature) in enumerate((("as it is", 1.0), ("calibrated", cascade.temperatures[0]))):
        sure = confidence(softmax(read.logits, temperature))
        place = np.clip(np.searchsorted(edges, sure, side="right") - 1, 0, _BUCKETS - 1)
        heights = np.bincount(place, hits, _BUCKETS) / np.maximum(1, np.bincount(place, minlength=_BUCKETS))
        width = (edges[1] - edges[0]) / 3
        left.bar(edges[:-1] + width * (shift + 1), heights, width=width, label=label)
    left.plot([edges[0], 1], [edges[0], 1], color="red")
    left.set(xlabel=f"confidence of {cascade.levels[0]}", ylabel="accuracy, test split", title=studied.name)
    left.legend()
    sure = np.linspace(0, 1, 400)
    right.plot(sure, reroute_probability(sure, cascade.cutoffs[0], cascade.slope))
    right.set(xlabel="confidence", ylabel="probability of going on")
    return plot


def _latencies(studied: Studied) -> Plot:
    """By system: 25%, median and 75%; whiskers at 1% and 99%."""
    plot, axes = plt.subplots(figsize=(9, 4))
    shown: dict[str, Floats] = {name: one.by_text for name, one in studied.alone.items()}
    for served in studied.served:
        shown[f"vote\n{served.loss:.1%} lost"] = ensemble_s(studied, served)
        shown[f"ours\n{served.loss:.1%} lost"] = served.timed.by_text
    axes.boxplot([1e3 * of for of in shown.values()], tick_labels=list(shown), whis=(1, 99), showfliers=False)
    axes.set(ylabel="ms from text to label", title=studied.name)
    return plot


def _cutoffs(studied: Studied, cascade: Candidate) -> Plot:
    """Accuracy and latency over the cut-off, on the test split."""
    plot, axes = plt.subplots(figsize=(7, 4))
    points = []
    for cutoff in CUTOFFS:
        one = replace(cascade, cutoffs=(cutoff,) * len(cascade.cutoffs))
        [found] = outcome.outcomes(one, studied.test, [0])
        seconds = outcome.seconds(one, studied.test, found.stops)
        points.append((cutoff, float(found.right.mean()), 1e3 * float(seconds.mean())))
    _two_lines(axes, np.array(points), "cut-off c", "accuracy", "latency in ms")
    axes.axvline(cascade.cutoffs[0], color="gray", linewidth=0.8)
    axes.set(title=studied.name)
    return plot


def _alphas(studied: Studied, cascade: Candidate) -> Plot:
    """The last level's accuracy and latency on texts that reach it, of what they are when nothing is pruned."""
    plot, axes = plt.subplots(figsize=(7, 4))
    points = []
    for alpha in _ALPHAS:
        pruned = outcome.pruning(cascade, studied.test, alpha)
        points.append((alpha, -pruned.accuracy_lost, 1 - pruned.saved))
    _two_lines(
        axes,
        np.array(points),
        "alpha",
        "accuracy gained on texts that reach the last level",
        "its latency, of that for whole texts",
    )
    axes.axvline(max(cascade.alphas), color="gray", linewidth=0.8)
    axes.set(title=studied.name)
    return plot


def arrivals(measured: Measured, task: str) -> Plot:
    """Mean and 99th percentile latency by load, when texts arrive at random."""
    plot, axes = plt.subplots(figsize=(7, 4))
    for name, color in ((SINGLE, "tab:orange"), (OURS, "tab:blue"), (ONE_ENCODER, "tab:green")):
        runs = [by_system[name] for by_system in measured.poisson.values()]
        means = [1e3 * float(np.median([of.mean() for of in some])) for some in runs]
        p99s = [1e3 * float(np.median([np.quantile(of, 0.99) for of in some])) for some in runs]
        axes.plot(list(measured.poisson), means, "-", marker="o", color=color, label=f"{name}, mean")
        axes.plot(list(measured.poisson), p99s, "--", marker="o", color=color, label=f"{name}, 99%")
    axes.set(xlabel="load, of what the best single model's service can answer", ylabel="ms", yscale="log", title=task)
    axes.legend()
    return plot


def _two_lines(axes: Axes, points: Floats, what: str, accuracy: str, latency: str) -> None:
    """Rows of `points`: x, accuracy, latency."""
    axes.plot(points[:, 0], points[:, 1], marker="o", color="tab:blue")
    axes.set_xlabel(what)
    axes.set_ylabel(accuracy, color="tab:blue")
    other = axes.twinx()
    other.plot(points[:, 0], points[:, 2], marker="s", color="tab:orange")
    other.set_ylabel(latency, color="tab:orange")
