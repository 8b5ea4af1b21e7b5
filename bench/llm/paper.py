"""Figures 4 to 7 of the paper, where both sides compute with our kernels, and only the policy differs (Flover §VI)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pliant.bench.findings import (
    Findings,
    Outcomes,
    best,
    interleaved,
    mean_latencies,
    totals,
)
from pliant.bench.llm import plots
from pliant.bench.llm.saturated import OURS, UNCOMPACTED
from pliant.bench.llm.saturated import OWN_INSTANCES as INSTANCES
from pliant.bench.llm.systems import DynamicBatching, Generate, System
from pliant.bench.llm.workload import PAPER_INTERVAL_MS, Integers, at_once, every, poisson, scaled, uniform_lengths
from pliant.bench.report import Figure, Row, median, ratio

_PAPER_FIG_5 = {20: "11.2x", 50: "11.1x", 100: "10.2x", 500: "4.5x", 1000: "4.2x", 5000: "1.1x"}


@dataclass(frozen=True)
class Scale:
    """How much of the paper is repeated: tokens of an answer (512 in the paper), and the values of each figure."""

    tokens: int
    counts: Sequence[int]
    lambdas_ms: Sequence[int]
    shortest: int
    upper: Sequence[int]
    windows_ms: Sequence[int]
    repetitions: int

    @property
    def runs(self) -> int:
        """How many there are."""
        pairs = 2 * (2 * len(self.counts) + len(self.lambdas_ms) + 1) + 3 * len(self.upper) + len(self.windows_ms)
        return self.repetitions * pairs


class Bench(NamedTuple):
    """What is compared: our engine, the same without compaction, instances, and a batch that nobody joins or leaves."""

    ours: System
    uncompacted: System
    instances: System
    static: Generate


def repeat(
    bench: Bench, prompts: Sequence[Integers], scale: Scale, solo_s: float, done: Callable[[], object]
) -> Findings:
    """All four; `solo_s` is what our engine takes for one request alone, against the paper's 5.8 s."""
    found = Findings()
    for part in (_figure_4, _figure_5, _figure_6, _figure_7):
        found.add(part(bench, prompts, scale, solo_s, done))
    return found


def _figure_4(
    bench: Bench, prompts: Sequence[Integers], scale: Scale, solo_s: float, done: Callable[[], object]
) -> Findings:
    """Growing numbers of requests, every 500 ms of the paper's time, and all at once."""
    both = {OURS: bench.ours, INSTANCES: bench.instances}
    paced: dict[int, Outcomes] = {}
    together: dict[int, Outcomes] = {}
    for count in scale.counts:
        workload = at_once(prompts[:count], [scale.tokens] * count)
        interval_s = scaled(PAPER_INTERVAL_MS, solo_s)
        paced[count] = interleaved(both, every(interval_s, workload), scale.repetitions, done)
        together[count] = interleaved(both, workload, scale.repetitions, done)
    most = scale.counts[-1]
    faster = ratio("", totals(paced[most][INSTANCES]), totals(paced[most][OURS]))
    figures = [_inflation("latency_inflation", together, count) for count in scale.counts if count in (8, most)]
    figures += [_inflation("latency_inflation_paced", paced, count) for count in scale.counts if count in (8, most)]
    inflations = " and ".join(f"{figure.value:.2f}x" for figure in figures)
    rows = [
        Row(f"Fig. 4a: {most} requests, every 500 ms: speedup over instances", "7x to 16.7x", f"{faster.value:.1f}x"),
        Row(
            f"Fig. 4c: mean latency of 8 and {most} requests over that of one",
            "1.03x and 1.08x, every 500 ms",
            f"{inflations}: at once, and every 500 ms",
        ),
    ]
    return Findings(figures, rows, {"figure-4": plots.concurrency(paced, solo_s)})


def _inflation(name: str, outcomes: Mapping[int, Outcomes], count: int) -> Figure:
    alone = mean_latencies(outcomes[1][OURS])
    others = statistics.median(mean_latencies(outcomes[count][INSTANCES])) / statistics.median(alone)
    beside = f"mean latency of {count} requests over that of one; instances: {others:.3g}"
    return ratio(f"{name}_{count}", mean_latencies(outcomes[count][OURS]), alone, beside=beside)


def _figure_5(
    bench: Bench, prompts: Sequence[Integers], scale: Scale, solo_s: float, done: Callable[[], object]
) -> Findings:
    """Poisson arrivals, from nearly together to nearly one after the other."""
    both = {OURS: bench.ours, INSTANCES: bench.instances}
    workload = at_once(prompts, [scale.tokens] * len(prompts))
    outcomes = {
        mean_ms: interleaved(both, poisson(scaled(mean_ms, solo_s), workload, seed=0), scale.repetitions, done)
        for mean_ms in scale.lambdas_ms
    }
    rows = []
    for mean_ms, by_system in outcomes.items():
        faster = ratio("", totals(by_system[INSTANCES]), totals(by_system[OURS])).value
        first = by_system[OURS][0]
        here = f"{faster:.1f}x, overlap {first.overlap:.0%}, {first.passes} iterations of {scale.tokens} at least"
        rows.append(Row(f"Fig. 5: Poisson, λ = {mean_ms} ms: speedup", _PAPER_FIG_5.get(mean_ms, ""), here))
    return Findings(rows=rows, plots={"figure-5": plots.arrivals(outcomes, solo_s)})


def _figure_6(
    bench: Bench, prompts: Sequence[Integers], scale: Scale, solo_s: float, done: Callable[[], object]
) -> Findings:
    """Lengths that range ever more widely, with and without compaction."""
    systems = {OURS: bench.ours, UNCOMPACTED: bench.uncompacted, INSTANCES: bench.instances}
    outcomes = {}
    for upper in scale.upper:
        lengths = uniform_lengths(len(prompts), scale.shortest, upper, seed=0)
        outcomes[upper] = interleaved(systems, at_once(prompts, lengths), scale.repetitions, done)
    gains = [ratio("", totals(run[UNCOMPACTED]), totals(run[OURS])).value for run in outcomes.values()]
    faster = [ratio("", totals(run[INSTANCES]), totals(run[OURS])).value for run in outcomes.values()]
    rows = [
        Row("Fig. 6: most by which compaction is faster", "1.20x to 1.23x", f"{max(gains):.2f}x"),
        Row("Fig. 6: lengths that range: speedup over instances", "23.4x", f"up to {max(faster):.1f}x"),
    ]
    return Findings(rows=rows, plots={"figure-6": plots.ranges(outcomes, scale.shortest, solo_s)})


def _figure_7(
    bench: Bench, prompts: Sequence[Integers], scale: Scale, solo_s: float, done: Callable[[], object]
) -> Findings:
    """How tokens add up, against dynamic batching with windows."""
    count = len(prompts)
    windows: dict[str, System] = {
        f"window of {window_ms} ms": DynamicBatching(bench.static, scaled(window_ms, solo_s), count)
        for window_ms in scale.windows_ms
    }
    workload = every(scaled(PAPER_INTERVAL_MS, solo_s), at_once(prompts, [scale.tokens] * count))
    systems = {OURS: bench.ours, INSTANCES: bench.instances, **windows}
    outcomes = interleaved(systems, workload, scale.repetitions, done)
    window = best(outcomes, windows)
    quickest = min(windows, key=lambda name: statistics.median(mean_latencies(outcomes[name])))
    ours = mean_latencies(outcomes[OURS])
    figures = [
        ratio(
            "speedup_vs_dynamic_batching", totals(outcomes[window]), totals(outcomes[OURS]), beside=f"best: {window}"
        ),
        ratio("mean_latency_vs_dynamic_batching", ours, mean_latencies(outcomes[quickest]), beside=f"best: {quickest}"),
    ]
    longest = f"window of {max(scale.windows_ms)} ms"
    waits = [float(np.mean(outcome.to_first_token)) for outcome in outcomes[longest]]
    delay = median("", [wait / solo_s for wait in waits]).value
    slower = ratio("", mean_latencies(outcomes[longest]), ours).value
    rows = [
        Row(
            f"Fig. 7: mean latency with a {longest}, over ours",
            "4x",
            f"{slower:.1f}x; first token after {delay:.1f} solo times",
        ),
        Row("Fig. 7: with the best window", "", f"{1 / figures[1].value:.2f}x ({quickest})"),
    ]
    return Findings(figures, rows, {"figure-7": plots.progress(outcomes, solo_s)})
