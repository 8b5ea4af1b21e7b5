"""Configurations against brute force, and the laws that any placement obeys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from pliant.policies.encoder.configurations import Configuration, ResidentRuntime, place

LENGTHS = (64, 128, 256, 512)


def runtimes(seconds: Sequence[float], memory_mb: Sequence[float]) -> list[ResidentRuntime]:
    return [ResidentRuntime(*each) for each in zip(LENGTHS, seconds, memory_mb, strict=True)]


def least_load(held: Sequence[frozenset[int]], seconds: Sequence[float], demand: Sequence[float]) -> float | None:
    """The least greatest load, over all ways to divide texts among replicas that hold these runtimes, if all fit."""
    if not any(len(LENGTHS) - 1 in runtimes_held for runtimes_held in held):
        return None
    solver = pywraplp.Solver.CreateSolver("GLOP")
    load = solver.NumVar(0, solver.infinity(), "")
    sums = [solver.Constraint(-solver.infinity(), 0) for _ in held]
    for constraint in sums:
        constraint.SetCoefficient(load, -1)
    for length, texts in enumerate(demand):
        served = solver.Constraint(texts, texts)
        for constraint, runtimes_held in zip(sums, held, strict=True):
            fitting = [seconds[index] for index in runtimes_held if index >= length]
            if fitting:
                share = solver.NumVar(0, solver.infinity(), "")
                served.SetCoefficient(share, 1)
                constraint.SetCoefficient(share, min(fitting))
    solver.Minimize(load)
    return load.solution_value() if solver.Solve() == pywraplp.Solver.OPTIMAL else None


PROBLEMS = {
    "demand": st.lists(st.sampled_from([0.0, 1.0, 7.0, 30.0, 100.0]), min_size=4, max_size=4).filter(sum),
    "steps": st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=4, max_size=4),
    "memory": st.lists(st.sampled_from([10.0, 25.0, 60.0]), min_size=4, max_size=4).map(sorted),
    "replicas": st.integers(1, 3),
    "budget": st.sampled_from([60.0, 75.0, 100.0, 240.0]),
}


@settings(max_examples=150, deadline=None)
@given(**PROBLEMS)
def test_against_every_choice_of_runtimes(
    demand: list[float], steps: list[float], memory: list[float], replicas: int, budget: float
) -> None:
    """No choice is below the bound; what is called proven is the best; none is twice it."""
    seconds = [0.001 + sum(steps[: index + 1]) for index in range(4)]
    found = place(runtimes(seconds, memory), demand, replicas, budget)
    fitting = [
        frozenset(chosen)
        for size in range(1, 5)
        for chosen in combinations(range(4), size)
        if sum(memory[index] for index in chosen) <= budget
    ]
    loads = [least_load(held, seconds, demand) for held in combinations_with_replacement(fitting, replicas)]
    best = min(load for load in loads if load is not None)
    assert found.bound <= best * (1 + 1e-6)
    assert best <= found.load * (1 + 1e-6)
    assert not found.proven or found.load == pytest.approx(best)
    assert found.load <= 2 * best
    held = [
        frozenset(LENGTHS.index(length) for length in configuration.lengths)
        for configuration, count in found.replicas.items()
        for _ in range(count)
    ]
    reached = least_load(held, seconds, demand)
    assert reached is not None
    assert reached <= found.load * (1 + 1e-6), "the replicas cannot do what is said of them"


@given(**PROBLEMS)
def test_laws(demand: list[float], steps: list[float], memory: list[float], replicas: int, budget: float) -> None:
    seconds = [0.001 + sum(steps[: index + 1]) for index in range(4)]
    found = place(runtimes(seconds, memory), demand, replicas, budget)
    taken = dict(zip(LENGTHS, memory, strict=True))
    assert sum(found.replicas.values()) == replicas
    for configuration, count in found.replicas.items():
        assert count > 0
        assert sum(taken[length] for length in configuration.lengths) <= budget
        assert list(configuration.lengths) == sorted(set(configuration.lengths))
        spare = budget - sum(taken[length] for length in configuration.lengths)
        assert all(taken[length] > spare for length in set(LENGTHS) - set(configuration.lengths))
    assert any(LENGTHS[-1] in configuration.lengths for configuration in found.replicas)
    if budget >= sum(memory):
        assert found.proven
        assert all(configuration.lengths == LENGTHS for configuration in found.replicas)


def test_short_texts_stay_off_replicas_that_long_ones_fill() -> None:
    """Equal work at 64 and 512: half of the replicas each, and all hold all."""
    resident = runtimes([0.001, 0.002, 0.004, 0.008], [10, 10, 10, 10])
    found = place(resident, [800.0, 0.0, 0.0, 100.0], 4, 40)
    assert found.replicas == {Configuration(64, LENGTHS): 2, Configuration(512, LENGTHS): 2}
    assert found.load == pytest.approx(0.4)
    assert found.proven


def test_a_tight_budget_leaves_out_what_costs_least_to_pad() -> None:
    resident = runtimes([0.001, 0.002, 0.0021, 0.008], [10, 10, 10, 10])
    found = place(resident, [100.0, 100.0, 1.0, 10.0], 1, 30)
    assert found.replicas == {Configuration(128, (64, 128, 512)): 1}
    assert found.bound == pytest.approx(0.1 + 0.2 + 0.0021 + 0.08)
    assert found.load == pytest.approx(0.1 + 0.2 + 0.008 + 0.08, rel=1e-3)
    assert not found.proven


def test_a_budget_for_one_runtime_gives_each_replica_one() -> None:
    resident = runtimes([0.001, 0.002, 0.004, 0.008], [10, 20, 40, 80])
    found = place(resident, [300.0, 150.0, 75.0, 37.5], 4, 80)
    assert {configuration.home for configuration in found.replicas} == set(LENGTHS)
    assert found.proven


def test_without_demand_homes_are_spread() -> None:
    resident = runtimes([0.001, 0.002, 0.004, 0.008], [10, 10, 10, 10])
    found = place(resident, [0.0] * 4, 8, 40)
    assert found.replicas == {Configuration(home, LENGTHS): 2 for home in LENGTHS}
    assert found.load == found.bound == 0.0


@pytest.mark.parametrize("share", [0.15, 0.3, 1.0])
def test_large_clusters_come_close_to_the_bound(share: float) -> None:
    lengths = np.arange(32, 513, 32)
    resident = [ResidentRuntime(int(length), 0.6e-3 + 8.4e-6 * length, 0.3 * length) for length in lengths]
    demand = np.random.default_rng(0).lognormal(3, 1, len(lengths))
    memory_mb = max(share * sum(runtime.memory_mb for runtime in resident), resident[-1].memory_mb)
    found = place(resident, demand.tolist(), 1_000, memory_mb)
    assert found.load <= 1.01 * found.bound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 0}, "at least one replica"),
        ({"demand": [1.0]}, "finite demand"),
        ({"demand": [1.0, 1.0, -1.0, 1.0]}, "finite demand"),
        ({"memory_mb": 79.0}, "at least 80, what the runtime for 512 tokens takes"),
        ({"runtimes": runtimes([0.1] * 4, [1] * 4)[::-1]}, "rising max_length"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    usual = {
        "runtimes": runtimes([0.001, 0.002, 0.004, 0.008], [10, 20, 40, 80]),
        "demand": [1.0] * 4,
        "replicas": 2,
        "memory_mb": 100.0,
    }
    with pytest.raises(ValueError, match=message):
        place(**{**usual, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(0, 0.1, 1.0), (64, 0.0, 1.0), (64, 0.1, -1.0)])
def test_bad_runtimes(wrong: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ResidentRuntime(*wrong)
