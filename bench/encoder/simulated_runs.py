"""How the simulated comparison is run: how long, on which streams, and what is kept of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib.figure import Figure as Plot

from pliant.bench import workloads
from pliant.bench.encoder.schemes import Setting, arrived, simulation
from pliant.bench.report import Figure, Row
from pliant.simulation.arrivals import Stream
from pliant.simulation.encoder.outcome import Outcome

NAMES = {"arlo": "Arlo", "st": "ST", "dt": "DT", "infaas": "INFaaS"}
"""Schemes, and what people call them."""
WARMUP = 60
"""Seconds that are simulated first and not counted: INFaaS starts with an even allocation, and finds its own."""


@dataclass(frozen=True)
class Plan:
    """Seconds of simulated time for each experiment."""

    seeds: Sequence[int]
    latencies: Mapping[int, int]
    """By number of GPUs; `capacities` too."""
    capacities: Mapping[int, int]
    on_gpu: Mapping[int, int]
    """As `capacities`, of a GPU that was measured, and that may take several times as many requests."""
    testbed: int
    sweep: int
    loads: Sequence[float]
    scaling: int
    large: tuple[int, int]
    runtimes: int
    dispatch: tuple[int, int, int]


QUICK = Plan(
    seeds=range(3), latencies={10: 20, 64: 5}, capacities={10: 10}, on_gpu={10: 5}, testbed=60,
    sweep=30, loads=(500, 1000, 1500, 2000, 2500), scaling=200,
    large=(5, 2), runtimes=60, dispatch=(20, 6, 2),
)  # fmt: skip
FULL = Plan(
    seeds=range(9), latencies={10: 60, 64: 20}, capacities={10: 20, 64: 8}, on_gpu={10: 5}, testbed=300,
    sweep=200, loads=(500, 1000, 1500, 1750, 2000, 2250, 2500, 3000),
    scaling=2400, large=(120, 120), runtimes=2400, dispatch=(600, 120, 30),
)  # fmt: skip


@dataclass
class Repeated:
    """What `simulate_paper` found."""

    figures: list[Figure] = field(default_factory=list)
    plots: dict[str, Plot] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


class Runs:
    def __init__(self, data: Path | None, plan: Plan) -> None:
        self.data = data
        self.plan = plan

    def stream(
        self, rate: float, seconds: int, seed: int, *, bursty: bool, varied: bool = False, warmup: int = WARMUP
    ) -> Stream:
        return workloads.twitter(self.data, rate, warmup + seconds, seed, bursty=bursty, varied=varied)

    def run(self, scheme: str, setting: Setting, stream: Stream, warmup: int = WARMUP) -> Outcome:
        """Arlo starts with the allocation that is best for the stream as a whole."""
        known = replace(setting, demand=arrived(setting.lengths, stream))
        return simulation(scheme, known).run(stream, warmup)

    def schemes(self, setting: Setting, stream: Stream, names: Iterable[str] = NAMES) -> dict[str, Outcome]:
        return {name: self.run(name, setting, stream) for name in names}


def mean(outcome: Outcome) -> float:
    """Mean latency in seconds."""
    return outcome.latencies.mean


def p98(outcome: Outcome) -> float:
    """The 98th percentile of latency, in seconds."""
    return outcome.latencies.quantile(0.98)


def ms(seconds: float) -> str:
    """Milliseconds, for people."""
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
