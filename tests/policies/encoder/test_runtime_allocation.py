"""The allocation is the best there is: against brute force, OR-tools' CP-SAT, and bounds that are found otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from pliant.policies.encoder import allocation_solver
from pliant.policies.encoder.runtime_allocation import Allocation, RuntimeClass, allocate, runtime_class

Case = tuple[list[RuntimeClass], list[float], int]

EXACT = 1e-9


def latency_s(runtime: RuntimeClass, load: float) -> float:
    table = runtime.latency_s
    step = runtime.capacity / (len(table) - 1)
    if load >= runtime.capacity:
        return table[-1] + max(0.0, table[-1] - table[-2]) * (load - runtime.capacity) / step
    sample = min(int(load / step), len(table) - 2)
    return table[sample] + (table[sample + 1] - table[sample]) * (load / step - sample)


def outcome(classes: Sequence[RuntimeClass], demand: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """Equations 1 and 4-6: the objective, and the requests beyond the last runtime's capacity."""
    total, carry = 0.0, 0.0
    for runtime, requests, count in zip(classes, demand, counts, strict=True):
        load = carry + requests
        carry = max(0.0, load - count * runtime.capacity)
        served = load if runtime is classes[-1] else load - carry
        if served:
            total += latency_s(runtime, served / count) * served
    return total, carry


def least(classes: Sequence[RuntimeClass], demand: Sequence[float]) -> list[int]:
    """Equations 3 and 7."""
    counts = [
        math.floor(requests / runtime.capacity + EXACT) for runtime, requests in zip(classes, demand, strict=True)
    ]
    return [*counts[:-1], max(1, counts[-1])]


def all_counts(floors: Sequence[int], replicas: int) -> Iterator[tuple[int, ...]]:
    """Equation 2."""
    first, *rest = floors
    if not rest:
        yield (replicas,)
        return
    for count in range(first, replicas - sum(rest) + 1):
        for others in all_counts(rest, replicas - count):
            yield (count, *others)


def brute_force(classes: Sequence[RuntimeClass], demand: Sequence[float], replicas: int) -> tuple[float, bool]:
    """The least objective, and whether equation 3 can hold."""
    floors = least(classes, demand)
    feasible = sum(floors) <= replicas
    if not feasible:
        floors = [0] * (len(classes) - 1) + [1]
    return min(outcome(classes, demand, counts)[0] for counts in all_counts(floors, replicas)), feasible


@st.composite
def cases(draw: st.DrawFn, rising: bool | None = None) -> Case:
    """At most 4 runtimes and 7 replicas, from no demand to overload; capacities in any order."""
    runtimes = draw(st.integers(1, 4))
    samples = draw(st.integers(2, 5))
    latency = st.lists(st.floats(1e-3, 10), min_size=samples, max_size=samples)
    if draw(st.booleans()) if rising is None else rising:
        latency = latency.map(sorted)
    lengths = sorted(draw(st.sets(st.integers(1, 512), min_size=runtimes, max_size=runtimes)))
    capacities = st.floats(0.5, 20) | st.integers(1, 5).map(float)
    classes = [RuntimeClass(length, draw(capacities), tuple(draw(latency))) for length in lengths]
    requests = st.just(0.0) | st.floats(1e-3, 40) | st.integers(1, 20).map(float)
    demand = draw(st.lists(requests, min_size=runtimes, max_size=runtimes))
    return classes, demand, draw(st.integers(1, 7))


def lognormal(replicas: int, runtimes: int, load: float, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    ends = np.arange(1, runtimes + 1) * 512 // runtimes
    classes = [runtime_class(int(end), 0.6e-3 + 4.3e-3 * float(end) / 512, 0.15) for end in ends]
    share = np.histogram(np.clip(rng.lognormal(4.6, 0.9, 10_000), 4, 512), bins=(0, *ends))[0] * 1.0
    needed = sum(share / [runtime.capacity for runtime in classes])
    return classes, (share * load * replicas / needed).tolist(), replicas


def check(case: Case, allocation: Allocation) -> float:
    """Everything that can be told from the counts alone; returns the objective."""
    classes, demand, replicas = case
    floors = least(classes, demand)
    cost, overload = outcome(classes, demand, allocation.counts)
    assert sum(allocation.counts) == replicas
    assert min(allocation.counts) >= 0
    assert allocation.counts[-1] >= 1
    assert allocation.feasible == (sum(floors) <= replicas)
    if allocation.feasible and any(demand):
        assert all(count >= floor for count, floor in zip(allocation.counts, floors, strict=True))
    assert allocation.overload == pytest.approx(overload, rel=EXACT, abs=EXACT * (1 + sum(demand)))
    assert allocation.latency_s * sum(demand) == pytest.approx(cost, rel=EXACT)
    return cost


@settings(max_examples=400)
@given(cases())
@example(([RuntimeClass(64, 2.0, (1.0, 1.0)), RuntimeClass(128, 3.0, (1.0, 5.0))], [0.0, 0.0], 5))
@example(([RuntimeClass(64, 1.0, (1.0, 1.0)), RuntimeClass(128, 1.0, (1.0, 2.0))], [9.0, 9.0], 3))
@example(([RuntimeClass(64, 0.1, (1.0, 9.0)), RuntimeClass(128, 0.1, (2.0, 9.0))], [0.3, 0.2], 5))
def test_equals_brute_force(case: Case) -> None:
    allocation = allocate(*case)
    best, feasible = brute_force(*case)
    assert allocation.proven
    assert allocation.feasible == feasible
    assert check(case, allocation) == pytest.approx(best, rel=EXACT)
    assert allocate(*case) == allocation


@given(cases(rising=True), st.integers(1, 5))
def test_more_replicas_never_cost_more(case: Case, more: int) -> None:
    classes, demand, replicas = case
    fewer, greater = allocate(*case), allocate(classes, demand, replicas + more)
    if fewer.feasible == greater.feasible:
        assert greater.latency_s <= fewer.latency_s * (1 + EXACT)


@pytest.mark.parametrize(("replicas", "runtimes"), [(40, 6), (300, 12), (1000, 16)])
@pytest.mark.parametrize("load", [0.5, 0.85, 0.97])
def test_medium_sizes_lie_within_bounds(replicas: int, runtimes: int, load: float) -> None:
    case = classes, demand, _ = lognormal(replicas, runtimes, load, seed=1)
    allocation = allocate(*case)
    cost = check(case, allocation)
    assert allocation.proven
    assert allocation.feasible

    bound = max(price_bound(case, price) for price in cost / replicas * np.geomspace(1e-3, 1e3, 100))
    assert bound <= cost <= 1.5 * bound
    for giver, taker in itertools.permutations(range(runtimes), 2):
        counts = list(allocation.counts)
        counts[giver] -= 1
        counts[taker] += 1
        if all(count >= floor for count, floor in zip(counts, least(classes, demand), strict=True)):
            assert outcome(classes, demand, counts)[0] >= cost * (1 - EXACT)


def price_bound(case: Case, price: float) -> float:
    """No counts cost less: loads are tried where the optimum of a convex table must lie, and only for all replicas."""
    classes, demand, replicas = case
    bound, onward = -price * replicas, math.inf
    for runtime, requests in zip(reversed(classes), reversed(demand), strict=True):
        loads = np.linspace(0, 3 * runtime.capacity, 600)[1:]
        table = np.linspace(0, runtime.capacity, len(runtime.latency_s))
        slope = (runtime.latency_s[-1] - runtime.latency_s[-2]) / (table[-1] - table[-2])
        beyond = np.maximum(loads - runtime.capacity, 0) * slope
        # At any load from one of these to the next, latency is at least that here, and price over load that there.
        latency = np.interp(loads, table, runtime.latency_s) + beyond
        latency = np.concatenate(([runtime.latency_s[0]], latency))[:-1]
        onward = min(onward, float((latency + price / loads).min()), float(latency[-1]))
        bound += requests * onward
    return bound


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rising", [True, False])
def test_agrees_with_cp_sat(seed: int, rising: bool) -> None:
    rng = np.random.default_rng(seed)
    runtimes, replicas = 3, 9
    tables = rng.uniform(1, 10, (runtimes, 4))
    if rising:
        tables.sort(axis=1)
    classes = [
        RuntimeClass(64 * (i + 1), float(rng.uniform(5, 20)), tuple(tables[i].tolist())) for i in range(runtimes)
    ]
    demand = (rng.dirichlet(np.ones(runtimes)) * 0.9 * replicas * 10).tolist()
    allocation = allocate(classes, demand, replicas)
    theirs = cp_sat(classes, demand, replicas)
    assert allocation.latency_s * sum(demand) <= outcome(classes, demand, theirs)[0] * (1 + EXACT)
    assert allocation.latency_s * sum(demand) == pytest.approx(outcome(classes, demand, theirs)[0], rel=1e-3)


def cp_sat(classes: Sequence[RuntimeClass], demand: Sequence[float], replicas: int) -> list[int]:
    """The optimum of equations 1-7 in integers: requests in 10,000ths of the demand, and latencies as finely."""
    unit, scale = sum(demand) / 10_000, 1e7 / max(max(runtime.latency_s) for runtime in classes)
    total = sum(round(requests / unit) for requests in demand)
    floors = least(classes, demand)
    if sum(floors) > replicas:
        floors = [0] * (len(classes) - 1) + [1]
    model = cp_model.CpModel()
    counts = [model.new_int_var(floor, replicas, "") for floor in floors]
    model.add(sum(counts) == replicas)
    costs, carry = [], 0
    for runtime, requests, count in zip(classes, demand, counts, strict=True):
        load, last = carry + round(requests / unit), runtime is classes[-1]
        capacity, segments = runtime.capacity / unit, len(runtime.latency_s) - 1
        served, carry = model.new_int_var(0, total, ""), model.new_int_var(0, total, "")
        model.add(carry == load - served)
        if last:
            model.add(carry == 0)
        else:
            model.add_min_equality(served, [load, count * round(capacity)])
        # Latency is a + b * served / count within a segment, so the cost is a * served + b * served² / count.
        some = model.new_int_var(1, replicas, "")
        model.add_max_equality(some, [count, 1])
        square, shared = model.new_int_var(0, total**2, ""), model.new_int_var(0, total**2, "")
        model.add_multiplication_equality(square, [served, served])
        model.add_division_equality(shared, square, some)
        cost = model.new_int_var(-(10**16), 10**16, "")
        chosen = [model.new_bool_var("") for _ in range(segments + last)]
        model.add_exactly_one(chosen)
        for segment, choice in enumerate(chosen):
            ends = [round(capacity * (segment + side) / segments) for side in (0, 1)]
            after = min(segment, segments - 1)
            slope = scale * (runtime.latency_s[after + 1] - runtime.latency_s[after]) * segments / capacity
            slope = round(max(0, slope) if segment == segments else slope)
            flat = round(scale * runtime.latency_s[segment]) - slope * ends[0]
            model.add(served >= ends[0] * some).only_enforce_if(choice)
            if segment < segments:
                model.add(served <= ends[1] * some).only_enforce_if(choice)
            model.add(cost == flat * served + slope * shared).only_enforce_if(choice)
        costs.append(cost)
    model.minimize(sum(costs))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return [solver.value(count) for count in counts]


def test_carries_a_little_demand_on_rather_than_give_it_a_replica() -> None:
    classes = [runtime_class(length, service_s, 0.1) for length, service_s in ((64, 1e-3), (128, 2e-3), (512, 5e-3))]
    allocation = allocate(classes, [100.0, 0.01, 10.0], 4)
    assert allocation.counts[1] == 0
    assert allocation.feasible


def test_infeasible_demand_is_said_and_served_as_well_as_can_be() -> None:
    classes = [runtime_class(64, 1e-3, 0.1), runtime_class(512, 5e-3, 0.1)]
    allocation = allocate(classes, [1000.0, 100.0], 4)
    assert not allocation.feasible
    assert allocation.overload > 0
    assert allocation.proven


def test_spreads_evenly_without_demand() -> None:
    classes = [runtime_class(length, 1e-3, 0.1) for length in (64, 128, 256)]
    nothing = [0.0, 0.0, 0.0]
    assert allocate(classes, nothing, 2).counts == (0, 1, 1)
    assert allocate(classes, nothing, 8).counts == (2, 3, 3)
    assert allocate(classes, nothing, 8).latency_s == 0


def test_prefers_the_longest_runtime_among_equals() -> None:
    classes = [RuntimeClass(length, 4.0, (1.0, 1.0, 1.0)) for length in (64, 128, 256)]
    assert allocate(classes, [2.0, 2.0, 0.0], 8).counts == (0, 0, 8)


def test_says_when_optimality_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    case = lognormal(50, 8, 0.97, seed=0)
    best = allocate(*case)
    monkeypatch.setattr(allocation_solver, "_FEW_STATES", 1)
    assert allocate(*case) == best
    monkeypatch.setattr(allocation_solver, "_MOST_STATES", 1)
    hurried = allocate(*case)
    assert not hurried.proven
    assert hurried.latency_s >= best.latency_s * (1 - EXACT)
    check(case, hurried)


def test_latency_of_a_runtime_is_finite_and_rises_with_load() -> None:
    runtime = runtime_class(128, 2e-3, 0.1)
    assert runtime.capacity == pytest.approx(50)
    assert runtime.latency_s[0] == pytest.approx(2e-3)
    assert runtime.latency_s[32] == pytest.approx(3e-3)  # M/D/1 at half load waits half a service time
    assert runtime.latency_s[-1] < 0.1
    slopes = np.diff(runtime.latency_s)
    assert (slopes > 0).all()
    assert (np.diff(slopes) > -1e-12).all()


GOOD = RuntimeClass(128, 10.0, (1.0, 2.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 10.0, (1.0, 2.0)), "max_length and capacity"),
        ((128, 0.0, (1.0, 2.0)), "max_length and capacity"),
        ((128, math.nan, (1.0, 2.0)), "max_length and capacity"),
        ((128, 10.0, (1.0,)), "at least two"),
        ((128, 10.0, (1.0, math.nan)), "positive, finite"),
        ((128, 10.0, (0.0, 1.0)), "positive, finite"),
    ],
)
def test_refuses_impossible_runtimes(values: tuple[int, float, tuple[float, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuntimeClass(*values)


@pytest.mark.parametrize("times", [(0.0, 0.1), (1e-3, 0.0), (math.nan, 0.1)])
def test_refuses_impossible_times(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        runtime_class(128, *times)


@pytest.mark.parametrize(
    ("classes", "demand", "replicas", "message"),
    [
        ([], [], 1, "at least one runtime"),
        ([GOOD, GOOD], [1.0, 1.0], 1, "rising max_length"),
        ([GOOD, RuntimeClass(256, 5.0, (1.0, 2.0, 3.0))], [1.0, 1.0], 1, "equally many loads"),
        ([GOOD], [1.0, 2.0], 1, "demand"),
        ([GOOD], [-1.0], 1, "demand"),
        ([GOOD], [math.nan], 1, "demand"),
        ([GOOD], [math.inf], 1, "demand"),
        ([GOOD], [1.0], 0, "at least one replica"),
    ],
)
def test_refuses_impossible_problems(
    classes: list[RuntimeClass], demand: list[float], replicas: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        allocate(classes, demand, replicas)
