"""One budget against autoscalers that know of each other only by what is left, on a simulated day of 64 GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot

from pliant.bench.budget.workload import DAY, NODES, cluster, twitter_bins
from pliant.bench.report import Figure, Options, Report, median
from pliant.errors import PliantError
from pliant.policies.cluster.attainment import Floats
from pliant.policies.cluster.baselines import Greedy, Independent
from pliant.policies.cluster.budget import Claim, Group, Nodes, Shape, alone
from pliant.policies.cluster.control import Decision, Joint, Offer, Policy
from pliant.policies.cluster.forecast import Forecast
from pliant.policies.cluster.program import solve
from pliant.simulation.cluster.simulator import Cascaded, Outcome, Served, Simulation

_SCALE = 1.1
"""Of all rates: target tracking at its best settings then reaches about 95% with 64 GPUs."""
_AMPLE = (Nodes(32, 8),)
"""For what 99% take: no budget binds."""
_PRICES = (0.06, 0.12, 0.2)
"""Of a GPU's second, as a share of what one earns on average."""
_HOLD_S = 1200.0
"""For what 99% take: chosen, as the prices, on the first three hours."""
_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9)
_REACHED = 0.99
_ROUNDS = 3


def run(options: Options) -> Report:
    """Figures and a plot. Quick: a quarter of the day, and fewer settings."""
    if options.data is None:
        raise PliantError("python -m bench cluster replays public traces: give their folder as --data")
    services, cascades = cluster(options.data, _SCALE)
    if options.quick:
        services, cascades = _shortened(services, cascades)
    start = {each.name: max(1, int(1.3 * each.rates[0] / each.each)) for each in services}
    simulate = partial(Simulation, services, cascades)
    joint = simulate(NODES).run(Joint(), start)
    oracle = simulate(NODES, known=True).run(Joint(moves_per_hour=1e9), start)
    greedy = simulate(NODES).run(Greedy(), start)
    targets = _TARGETS[1::2] if options.quick else _TARGETS
    independent = [simulate(NODES).run(Independent(target), start) for target in targets]
    best = max(independent, key=lambda outcome: outcome.attainment)

    seconds = len(services[0].rates)
    each_earns = len([*services, *cascades]) / DAY / 64
    ample = simulate(_AMPLE)
    ours_99 = _hours(ample.run(Joint(share * each_earns, _HOLD_S), start) for share in _PRICES)
    theirs_99 = _hours(ample.run(Independent(target), start) for target in targets[:3])
    static_99 = _hours(_static(ample, services, cascades, share) for share in (0.97, 0.98, 0.99, 0.995, 0.999))

    def one(name: str, value: float, target: str = "", beside: str = "") -> Figure:
        return median(name, [value], target, beside)

    seen = f"{joint.attainment:.1%} and {best.attainment:.1%} of 64 GPUs"
    figures = [
        one("attainment_loss_vs_independent", (1 - joint.attainment) / (1 - best.attainment), "<= 0.5", seen),
        one("vs_greedy", joint.attainment / greedy.attainment, "", f"{greedy.moves_per_hour:.1f} moves an hour"),
        one("share_of_oracle", joint.attainment / oracle.attainment, ">= 0.93", f"{oracle.attainment:.1%}"),
        one("moves_per_service_and_hour", joint.moves_per_hour, "<= 6", f"target tracking {best.moves_per_hour:.1f}"),
        one("gpu_hours_vs_static_peak_at_99", ours_99 / static_99, "<= 0.6", f"{ours_99:,.0f}, {static_99:,.0f}"),
        one("gpu_hours_vs_independent_at_99", ours_99 / theirs_99, "<= 0.85", f"{ours_99:,.0f}, {theirs_99:,.0f}"),
        *_solving(),
        *_forecasting(twitter_bins(options.data)),
    ]
    outcomes = {"one budget": joint, "target tracking": best, "greedy": greedy, "oracle": oracle}
    config = {
        "seconds": seconds,
        "scale": _SCALE,
        "targets": targets,
        "attainment": {name: _attainments(outcome) for name, outcome in outcomes.items()},
        "gpu_hours": {name: round(outcome.gpu_hours) for name, outcome in outcomes.items()},
        "moves_per_hour": {name: round(outcome.moves_per_hour, 2) for name, outcome in outcomes.items()},
        "reasons": [f"{now:.0f} s: {reason}" for now, reason in joint.reasons[:40]],
    }
    return Report(figures, config, {"services": _plot(outcomes)})


def _shortened(services: list[Served], cascades: list[Cascaded]) -> tuple[list[Served], list[Cascaded]]:
    end = DAY // 4
    return (
        [replace(each, rates=each.rates[:end]) for each in services],
        [replace(each, rates=each.rates[:end]) for each in cascades],
    )


class _Fixed:
    """As many replicas as ever."""

    def __init__(self, replicas: Mapping[str, int]) -> None:
        self._replicas = replicas

    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision:
        return Decision(self._replicas, (0,) * len(offers), (), {})


def _static(ample: Simulation, services: Sequence[Served], cascades: Sequence[Cascaded], share: float) -> Outcome:
    """Each service has what the demand of so many of its seconds takes."""
    replicas = {}
    for each in services:
        asked = each.rates + sum(
            cascade.rates * (1.0 if cascade.first == each.name else cascade.choices[0][0])
            for cascade in cascades
            if each.name in (cascade.first, cascade.then)
        )
        replicas[each.name] = int(np.ceil(np.quantile(asked, share) / each.each))
    policy: Policy = _Fixed(replicas)
    return ample.run(policy, replicas)


def _hours(outcomes: Iterable[Outcome]) -> float:
    """The fewest GPU hours that reach 99%; infinite where none does."""
    return min((each.gpu_hours for each in outcomes if each.attainment >= _REACHED), default=float("inf"))


def _solving() -> list[Figure]:
    """50 services on 1,000 GPUs: shapes that divide each other, and shapes that do not; seconds of one processor."""
    figures = []
    for name, nodes, shapes, target in (
        (
            "solve_seconds_50x1000",
            [Nodes(125, 8, 192)],
            [Shape(1, 4), Shape(2, 8), Shape(4, 16), Shape(0.5, 2), Shape(0.25, 2), Shape(8, 32)],
            "<= 0.5",
        ),
        (
            "solve_seconds_50x1000_awkward",
            [Nodes(100, 8, 96), Nodes(50, 4, 64)],
            [Shape(1, 4), Shape(3, 8), Shape(5, 16), Shape(0.5, 16), Shape(0.3, 2), Shape(8, 32), Shape(0, 8)],
            "<= 0.5",
        ),
    ):
        took, gaps = [], []
        for seed in range(_ROUNDS + 1):
            groups = _made_up(shapes, seed)
            began = time.process_time()
            split = solve(groups, nodes, reserve=16)
            took.append(time.process_time() - began)
            gaps.append(split.gap)
        figures.append(median(name, took[1:], target, f"the first, which finds patterns: {took[0]:.1f} s"))
        figures.append(median(name.replace("solve_seconds", "bound_gap"), gaps[1:], "<= 0.001"))
    return figures


def _made_up(shapes: list[Shape], seed: int) -> list[Group]:
    rng = np.random.default_rng(seed)
    groups = []
    for at in range(50):
        shape = shapes[at % len(shapes)]
        size = max(shape.gpus, 0.25)
        need = rng.uniform(5, 80) / size
        replicas = np.arange(int(1000 / size) + 1)
        served = np.mean([np.minimum(replicas / (need * factor), 1) for factor in (0.6, 0.8, 1, 1.2, 1.6)], axis=0)
        claim = Claim(str(at), shape, 1, len(replicas) - 1, int(need / 2), 0.1, 0.05)
        groups.append(alone(claim, rng.uniform(0.5, 3) * need * size * served))
    return groups


def _forecasting(rates: Floats) -> list[Figure]:
    """Mean absolute error over that of "as now", on five days of two-minute bins."""
    figures = []
    for ahead in (1, 2, 5):
        forecast = Forecast(120.0, ahead)
        made = []
        for rate in rates.tolist():
            forecast.observe(rate)
            made.append(forecast.rate)
        later = rates[ahead:]
        ours = np.abs(np.array(made)[:-ahead] - later).mean()
        naive = np.abs(rates[:-ahead] - later).mean()
        figures.append(median(f"forecast_error_vs_naive_{2 * ahead}_minutes", [float(ours / naive)], "<= 0.9"))
    return figures


def _attainments(outcome: Outcome) -> dict[str, float]:
    shares = {name: round(outcome.earned[name] / outcome.possible[name], 4) for name in outcome.earned}
    return {"all": round(outcome.attainment, 4), **shares}


def _plot(outcomes: Mapping[str, Outcome]) -> Plot:
    plot, axes = plt.subplots(figsize=(8, 4))
    names = list(next(iter(outcomes.values())).earned)
    for at, (name, outcome) in enumerate(outcomes.items()):
        shares = [outcome.earned[each] / outcome.possible[each] for each in names]
        axes.bar(np.arange(len(names)) + 0.2 * (at - 1.5), shares, 0.2, label=name)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0.8, 1.0)
    axes.set_ylabel("of what could be earned")
    axes.legend()
    return plot
