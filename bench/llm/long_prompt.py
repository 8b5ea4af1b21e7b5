"""What a long prompt does to everybody else: to answers under way, and to those that wait for their first token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pliant.bench.findings import Findings, interleaved
from pliant.bench.llm.ours import STALL_S
from pliant.bench.llm.outcome import Floats, Outcome
from pliant.bench.llm.systems import System
from pliant.bench.llm.workload import Request, at_once, prompts
from pliant.bench.report import Row, median, ratio

CHUNKED = "ours"
WHOLE = "ours, prompts in one piece"
IN_ORDER = "ours, prompts as they came"
_BEFORE_S = 0.2
"""For which answers are under way before the long prompt comes."""


@dataclass(frozen=True)
class Scale:
    """Tokens of the long prompt, of the short ones, and of the answers under way, and how many there are of each."""

    long: int
    short: int
    shorts: int
    live: int
    answer: int
    repetitions: int

    @property
    def runs(self) -> int:
        """How many there are: two workloads on ours, and the third on all."""
        return 5 * self.repetitions


def measure(systems: Mapping[str, System], scale: Scale, vocab: int, done: Callable[[], object]) -> Findings:
    """`systems` are ours with prompts in chunks, in one piece, and one after another.

    Three workloads: the long prompt alone, answers under way alone, and both, with short prompts that arrive while the
    long one would be prefilled if it were alone.
    """
    ours = {CHUNKED: systems[CHUNKED]}
    texts = prompts(scale.live + scale.shorts, scale.short, vocab, seed=1)
    (lengthy,) = prompts(1, scale.long, vocab, seed=2)
    live = at_once(texts[: scale.live], [scale.answer] * scale.live)
    alone = interleaved(ours, at_once([lengthy], [2]), scale.repetitions, done)[CHUNKED]
    calm = interleaved(ours, live, scale.repetitions, done)[CHUNKED]
    alone_s = statistics.median(float(run.first[0]) for run in alone)
    usual_s = statistics.median(float(np.median(_gaps(run, scale.live, 0.0, math.inf))) for run in calm)

    arrivals = _BEFORE_S + alone_s * np.arange(1, scale.shorts + 1) / (scale.shorts + 1)
    shorts = [Request(text, 2, at_s) for text, at_s in zip(texts[scale.live :], arrivals.tolist(), strict=True)]
    runs = interleaved(systems, [*live, Request(lengthy, 2, _BEFORE_S), *shorts], scale.repetitions, done)
    waits, before = ([_p99(run.to_first_token[scale.live + 1 :]) for run in runs[name]] for name in (CHUNKED, IN_ORDER))
    stalls = {name: [_during(run, scale.live) - usual_s for run in outcomes] for name, outcomes in runs.items()}
    whole = statistics.median(stalls[WHOLE]) / STALL_S
    figures = [
        median(
            "ttft_p99_during_long_prefill",
            [wait / alone_s for wait in waits],
            beside=f"of short prompts, over what one of {scale.long} tokens takes alone, {alone_s * 1e3:.3g} ms",
        ),
        ratio("short_ttft_p99_behind_long_prompts_vs_before", waits, before, "<= 0.25", "prompts one after another"),
        median(
            "stall_over_bound",
            [stall / STALL_S for stall in stalls[CHUNKED]],
            "<= 1",
            f"P99 of what tokens of others wait longer, over {STALL_S * 1e3:g} ms; without chunks: {whole:.3g}",
        ),
    ]
    here = f"{figures[1].value:.2f} of its bound; without chunks: {whole:.1f}"
    return Findings(figures, [Row("Beyond: stall of others by a long prompt", "", here)])


def _during(run: Outcome, live: int) -> float:
    """P99 of the gaps between tokens of the answers under way, while the long prompt is prefilled."""
    return _p99(_gaps(run, live, float(run.arrivals[live]), float(run.first[live])))


def _gaps(run: Outcome, live: int, start_s: float, stop_s: float) -> Floats:
    return np.concatenate([run.gaps(index, start_s, stop_s) for index in range(live)])


def _p99(seconds: Floats) -> float:
    return float(np.percentile(seconds, 99))
