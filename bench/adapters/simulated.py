"""Chameleon's evaluation on an A40, repeated in the simulator: Figures 7 and 10 to 16, and what they must show (§5)."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pliant.bench.adapters import plots
from pliant.bench.adapters.runs import SLO, Case, Result, Run, Runs
from pliant.bench.adapters.systems import (
    FAIR_SHARE,
    LRU,
    NO_CACHE,
    NO_SCHEDULER,
    ONLINE,
    OURS,
    OUTPUT_ONLY,
    PREFETCH,
    S_LORA,
    SJF,
    System,
)
from pliant.bench.adapters.workload import RANKS
from pliant.bench.findings import Findings
from pliant.bench.report import Figure, Row, median, ratio

LOADS = {"low": 0.69, "medium": 0.92, "high": 1.03}
"""In units of X, where S-LoRA's policy first violates the SLO: the paper's 6, 8 and 9 requests per second over 8.7."""
_PAPER_P99 = {"low": 14.7, "medium": 24.6, "high": 80.7}
_PAPER_P50 = {"low": 13.9, "medium": 20.9, "high": 48.1}
_PAPER_THROUGHPUT = {OURS: "1.5", NO_SCHEDULER: "1.2", NO_CACHE: "1.1"}
_PAPER_CACHES = {LRU: 18, FAIR_SHARE: 22, NO_SCHEDULER: 26}
_MAIN = (S_LORA, OURS, NO_SCHEDULER, NO_CACHE)
_ACCURACIES = (1.0, 0.8, 0.6)
_WINDOW_S = 60.0
_SIZES = ("smallest", "small", "large", "largest")
"""Quarters of the requests by their weighted size."""


@dataclass(frozen=True)
class Scale:
    """How much is simulated: seconds of requests in a run, its seeds, and how closely limits are looked for."""

    seconds: float
    seeds: Sequence[int]
    rounds: int
    loads: Sequence[float]
    """Of Figures 10 to 12, in units of X."""


@dataclass
class Study:
    """One case, the load X of it by seed, and the runs at loads relative to that."""

    runs: Runs
    scale: Scale
    case: Case
    x: Sequence[float]
    """By seed."""
    found: Findings = field(default_factory=Findings)

    def at(self, load: float, *systems: System) -> list[list[Result]]:
        """For each system a result for each seed, at `load` times the median X."""
        rate = load * statistics.median(self.x)
        seconds, seeds = self.scale.seconds, self.scale.seeds
        results = self.runs.all(Run(self.case, system, rate, seconds, seed) for system in systems for seed in seeds)
        return [results[start : start + len(seeds)] for start in range(0, len(results), len(seeds))]


def study(runs: Runs, scale: Scale, case: Case, baseline: System = S_LORA) -> tuple[Study, list[float]]:
    """Find X of a case; also our limit over it, by seed."""
    x, ours = runs.limits([(case, baseline), (case, OURS)], scale.seeds, scale.seconds, scale.rounds)
    return Study(runs, scale, case, x), [mine / theirs for mine, theirs in zip(ours, x, strict=True)]


def repeat(runs: Runs, scale: Scale, case: Case) -> Findings:
    """All of it."""
    this, gain = study(runs, scale, case)
    _throughput(this, gain)
    for part in (_targets, _classes, _loads, _slowdown, _caches, _schedulers, _predictors):
        part(this)
    return this.found


def p99s(results: Sequence[Result]) -> list[float]:
    """Of the times to the first token, by seed."""
    return [result.p99() for result in results]


def p50s(results: Sequence[Result]) -> list[float]:
    """Of the times to the first token, by seed."""
    return [result.p50() for result in results]


def versus(name: str, ours: Sequence[float], theirs: Sequence[float], target: str = "") -> Figure:
    """The figure ours / theirs, in seconds."""
    beside = f"{statistics.median(ours):.3g} against {statistics.median(theirs):.3g} s"
    return ratio(name, ours, theirs, target, beside)


def change(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """By how many percent the first are more, or with a minus less, in the median over seeds."""
    return f"{100 * (statistics.median(map(operator.truediv, ours, theirs)) - 1):+.1f}%"


def _throughput(this: Study, gain: Sequence[float]) -> None:
    """The load within the SLO (§5.2)."""
    beside = f"S-LoRA's policy takes {statistics.median(this.x):.2f} requests/s"
    this.found.figures.append(median("load_within_slo_vs_slora", gain, ">= 1.5", beside))
    parts = (NO_SCHEDULER, NO_CACHE)
    limits = this.runs.limits(
        [(this.case, system) for system in parts], this.scale.seeds, this.scale.seconds, this.scale.rounds
    )
    for system, gains in zip((OURS, *parts), (gain, *_ratios(limits, this.x)), strict=True):
        here = f"{statistics.median(gains):.2f}"
        this.found.rows.append(Row(f"Load within SLO, {system.name}", _PAPER_THROUGHPUT[system], here))
    this.found.rows.append(Row("S-LoRA's load within SLO, requests/s", "8.7", f"{statistics.median(this.x):.2f}"))


def _ratios(ours: Sequence[Sequence[float]], theirs: Sequence[float]) -> list[list[float]]:
    return [[mine / other for mine, other in zip(line, theirs, strict=True)] for line in ours]


def _targets(this: Study) -> None:
    """Times to first token against S-LoRA's policy at the paper's three loads, and what the cache alone gains."""
    targets = {"high": "<= 0.19"}
    for load, factor in LOADS.items():
        slora, ours = this.at(factor, S_LORA, OURS)
        this.found.figures.append(versus(f"p99_ttft_vs_slora_{load}", p99s(ours), p99s(slora), targets.get(load, "")))
        for what, paper, values in (("P99", _PAPER_P99, p99s), ("P50", _PAPER_P50, p50s)):
            here = change(values(ours), values(slora))
            this.found.rows.append(Row(f"{what} time to first token, {load} load", f"-{paper[load]}%", here))
        if load == "high":
            this.found.figures.append(versus("p50_ttft_vs_slora_high", p50s(ours), p50s(slora), "<= 0.52"))
    for load, factor in LOADS.items():
        none, cached = this.at(factor, S_LORA, NO_SCHEDULER)
        name, target = ("cache_p99_vs_none", "<= 0.74") if load == "medium" else (f"cache_p99_vs_none_{load}", "")
        this.found.figures.append(versus(name, p99s(cached), p99s(none), target))


def _classes(this: Study) -> None:
    """The class of requests that fares worst against FIFO with the same cache, by size or by rank, over all seeds."""
    for load, factor in LOADS.items():
        fifo, ours = this.at(factor, NO_SCHEDULER, OURS)
        value, which = _worst_class(ours, fifo)
        spread = [_worst_class([mine], [theirs])[0] for mine, theirs in zip(ours, fifo, strict=True)]
        name, target = ("", "<= 1") if load == "high" else (f"_{load}", "")
        low, high = min(value, *spread), max(value, *spread)
        this.found.figures.append(Figure(f"p99_worst_class_vs_fifo{name}", value, low, high, target, which))


def _worst_class(ours: Sequence[Result], theirs: Sequence[Result]) -> tuple[float, str]:
    """The greatest ratio of P99s, and of which class; both have answered the same requests."""
    size, rank = (np.concatenate(parts) for parts in zip(*((run.size, run.rank) for run in ours), strict=True))
    mine, others = (np.concatenate([run.first for run in runs]) for runs in (ours, theirs))
    quarters = np.searchsorted(np.quantile(size, (0.25, 0.5, 0.75)), size)
    classes = {f"{name} quarter": quarters == index for index, name in enumerate(_SIZES)}
    classes |= {f"rank {each}": rank == each for each in RANKS}
    ratios = {
        name: float(np.quantile(mine[members], 0.99) / np.quantile(others[members], 0.99))
        for name, members in classes.items()
    }
    worst = max(ratios, key=ratios.__getitem__)
    return ratios[worst], worst


def _loads(this: Study) -> None:
    """Figures 10, 11 and 12."""
    p99: dict[str, list[float]] = {system.name: [] for system in _MAIN}
    p50: dict[str, list[float]] = {system.name: [] for system in _MAIN[:2]}
    gaps: dict[str, list[float]] = {system.name: [] for system in _MAIN[:2]}
    for load in this.scale.loads:
        for system, results in zip(_MAIN, this.at(load, *_MAIN), strict=True):
            p99[system.name].append(statistics.median(p99s(results)))
            if system.name in p50:
                p50[system.name].append(statistics.median(p50s(results)))
                gaps[system.name].append(statistics.median(result.between_tokens for result in results) * 1e3)
    [[slora, *_]] = this.at(LOADS["low"], S_LORA)
    loads = this.scale.loads
    this.found.plots["fig10"] = plots.by_load(loads, p99, "P99 time to first token (s)", SLO * slora.p99_alone)
    this.found.plots["fig11"] = plots.by_load(loads, gaps, "P99 time between tokens (ms)", 150)
    this.found.plots["fig12"] = plots.by_load(loads, p50, "P50 time to first token (s)", None)
    for load, theirs, ours in zip(loads, *gaps.values(), strict=True):
        here = f"S-LoRA {theirs:.0f}, Chameleon {ours:.0f}"
        this.found.rows.append(Row(f"Fig. 11, P99 time between tokens at {load:g} X, ms", "< 150 (SLO)", here))


def _slowdown(this: Study) -> None:
    """Figure 7: latency over latency alone, with FIFO, shortest first, and our queues; no cache of idle adapters."""
    systems = (S_LORA, SJF, NO_CACHE)
    panels = {}
    for load in ("medium", "high"):
        results = this.at(LOADS[load], *systems)
        slowdowns = [np.concatenate([run.last / run.last_alone for run in runs]) for runs in results]
        panels[load] = {system.name: values for system, values in zip(systems, slowdowns, strict=True)}
        here = ", ".join(f"{name} {np.quantile(values, 0.99):.1f}" for name, values in panels[load].items())
        this.found.rows.append(Row(f"Fig. 7, P99 slowdown, {load} load", "(plot only)", here))
    this.found.plots["fig7"] = plots.slowdowns(panels)


def _caches(this: Study) -> None:
    """Figures 14 and 15: by rank, medium load, relative to S-LoRA."""
    systems = (LRU, FAIR_SHARE, NO_SCHEDULER, OURS, PREFETCH)
    slora, *others = this.at(LOADS["medium"], S_LORA, *systems)
    names = {NO_SCHEDULER: "compound"}
    by_rank = {
        names.get(system, system.name): [_of_rank(results, rank, slora) for rank in RANKS]
        for system, results in zip(systems, others, strict=True)
    }
    ranks = [f"rank {rank}" for rank in RANKS]
    what = "P99 time to first token over S-LoRA's"
    this.found.plots["fig14"] = plots.bars(ranks, dict(list(by_rank.items())[:3]), what)
    this.found.plots["fig15"] = plots.bars(ranks, dict(list(by_rank.items())[3:]), what)
    for system, results in zip(systems[:3], others[:3], strict=True):
        here = change(p99s(results), p99s(slora))
        name = f"Fig. 14, P99 with cache {names.get(system, system.name)}, medium load"
        this.found.rows.append(Row(name, f"-{_PAPER_CACHES[system]}%", here))
    here = change(p99s(others[4]), p99s(others[3]))
    this.found.rows.append(Row("Fig. 15, P99 by predicted prefetch, medium load", "-8.8%", here))


def _of_rank(ours: Sequence[Result], rank: int, slora: Sequence[Result]) -> float:
    """The ratio of P99s among requests for adapters of this rank."""
    return statistics.median(
        float(np.quantile(mine.first[mine.rank == rank], 0.99) / np.quantile(other.first[other.rank == rank], 0.99))
        for mine, other in zip(ours, slora, strict=True)
    )


def _schedulers(this: Study) -> None:
    """Figure 13: P99 over time, high load."""
    systems = (S_LORA, SJF, NO_CACHE, OURS)
    results = this.at(LOADS["high"], *systems)
    ends, lines = _over_time(systems, results, this.scale.seconds)
    this.found.plots["fig13"] = plots.over_time(ends, lines)
    for system, runs in zip(systems[1:], results[1:], strict=True):
        here = change(p99s(runs), p99s(results[0]))
        this.found.rows.append(Row(f"Fig. 13, P99, {system.name}, high load", "(plot only)", here))


def _predictors(this: Study) -> None:
    """Figure 16: how accurate the predictor must be, high load; and our own, which learns."""
    systems = [
        replace(system, name=f"{system.name} {accuracy:.0%}", accuracy=accuracy)
        for system in (OURS, OUTPUT_ONLY)
        for accuracy in _ACCURACIES
    ]
    systems.append(ONLINE)
    results = this.at(LOADS["high"], *systems)
    ends, lines = _over_time(systems, results, this.scale.seconds)
    this.found.plots["fig16"] = plots.over_time(ends, lines)
    for system, runs in zip(systems, results, strict=True):
        squashed = statistics.median(run.squashed for run in runs)
        here = f"{statistics.median(p99s(runs)):.2f} s, {squashed:.1%} squashed"
        this.found.rows.append(Row(f"Fig. 16, P99, {system.name}, high load", "(plot only; <= 5% squashed)", here))


def _over_time(
    systems: Sequence[System], results: Sequence[Sequence[Result]], seconds: float
) -> tuple[list[float], dict[str, list[float]]]:
    """The ends of windows of a minute, and P99 in each, over the seeds."""
    starts = np.arange(_WINDOW_S, seconds, _WINDOW_S)
    lines = {}
    for system, runs in zip(systems, results, strict=True):
        at_s = np.concatenate([run.at_s for run in runs])
        first = np.concatenate([run.first for run in runs])
        within = [(at_s >= start) & (at_s < start + _WINDOW_S) for start in starts]
        lines[system.name] = [float(np.quantile(first[members], 0.99)) for members in within]
    return [float(start + _WINDOW_S) for start in starts], lines
