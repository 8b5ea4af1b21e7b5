"""How systems are compared, and what is kept of it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure as Plot

from pliant.bench.llm.outcome import Outcome
from pliant.bench.llm.systems import System
from pliant.bench.llm.workload import Workload
from pliant.bench.report import Figure, Row, ratio

Outcomes = dict[str, list[Outcome]]
"""System -> an outcome for each repetition; those with the same place ran side by side."""


@dataclass
class Findings:
    """What one part of the benchmark found."""

    figures: list[Figure] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    plots: dict[str, Plot] = field(default_factory=dict)

    def add(self, other: Findings) -> None:
        """Take over what another part found."""
        self.figures += other.figures
        self.rows += other.rows
        self.plots |= other.plots


def interleaved(
    systems: Mapping[str, System], workload: Workload, repetitions: int, done: Callable[[], object]
) -> Outcomes:
    """Every system on the same workload, in turn and in another order each time. Calls `done` after each run."""
    outcomes: Outcomes = {name: [] for name in systems}
    for repetition in range(repetitions):
        for name in random.Random(repetition).sample(sorted(systems), len(systems)):
            outcomes[name].append(systems[name].run(workload))
            done()
    return outcomes


def totals(outcomes: Sequence[Outcome]) -> list[float]:
    """The total latency of each, in seconds."""
    return [outcome.total_s for outcome in outcomes]


def mean_latencies(outcomes: Sequence[Outcome]) -> list[float]:
    """The mean latency of a request in each, in seconds."""
    return [float(outcome.latencies.mean()) for outcome in outcomes]


def tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    """The median over outcomes."""
    return statistics.median(outcome.tokens / outcome.total_s for outcome in outcomes)


def speedup(name: str, ours: Sequence[Outcome], theirs: Sequence[Outcome], target: str = "") -> Figure:
    """How many times longer the others take in total."""
    beside = f"{tokens_per_s(ours):,.0f} against {tokens_per_s(theirs):,.0f} tokens/s"
    return ratio(name, totals(theirs), totals(ours), target, beside)


def best(outcomes: Outcomes, names: Iterable[str]) -> str:
    """Of these systems the one with the least median total."""
    return min(names, key=lambda name: statistics.median(totals(outcomes[name])))
