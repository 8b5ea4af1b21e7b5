"""When plans are made, and for which demand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.planning import Planner, Residency, even_plan, solve

LENGTHS = (64, 128, 512)
SERVICE_S = {64: 0.01, 128: 0.02, 512: 0.08}


def plan(planner: Planner, now: float, replicas: int) -> None:
    reason = planner.due(now, replicas, LENGTHS)
    assert reason
    problem = planner.problem(now, replicas, SERVICE_S)
    planner.adopt(now, problem, solve(problem), reason)


def run(planner: Planner, start: float, seconds: int, **arrivals: int) -> float:
    """A report each second: texts of length `l64=10` and so on."""
    counts = {int(name[1:]): count for name, count in arrivals.items()}
    for second in range(seconds):
        planner.observe(start + second + 1, counts)
    return start + seconds


@pytest.fixture
def planner() -> Planner:
    return Planner(longest=512, slo_s=1.0, period_s=60)


def test_nothing_is_due_before_enough_has_arrived(planner: Planner) -> None:
    now = run(planner, 0, 9, l64=10)
    assert planner.due(now, 4, LENGTHS) is None
    now = run(planner, now, 1, l64=10)
    assert planner.due(now, 4, LENGTHS) == "start"
    assert planner.due(now, 0, LENGTHS) is None, "no replicas"


def test_a_plan_is_for_the_demand_per_slo_period(planner: Planner) -> None:
    now = run(planner, 0, 20, l60=8, l100=2)
    plan(planner, now, 4)
    assert planner.plan
    assert planner.plan.demand == pytest.approx({64: 8, 128: 2, 512: 0})
    assert sum(planner.plan.counts.values()) == 4
    assert planner.plan.counts[512] >= 1
    assert planner.plan.version == 1


def test_a_plan_made_from_little_is_made_anew_when_as_much_again_was_seen(planner: Planner) -> None:
    now = run(planner, 0, 10, l64=10)
    for seen in (10, 20, 40):
        plan(planner, now, 4)
        now = run(planner, now, seen - 1, l64=10)
        assert planner.due(now, 4, LENGTHS) is None
        now = run(planner, now, 1, l64=10)
        assert planner.due(now, 4, LENGTHS) == "period"


def test_plans_are_made_anew_each_period_if_anything_arrives(planner: Planner) -> None:
    now = run(planner, 0, 70, l64=10)
    plan(planner, now, 4)
    now = run(planner, now, 58, l64=10)
    assert planner.due(now, 4, LENGTHS) is None
    now = run(planner, now, 2, l64=10)
    assert planner.due(now, 4, LENGTHS) == "period"
    plan(planner, now, 4)
    assert planner.due(now + 1000, 4, LENGTHS) is None, "nothing arrived for long"


def test_replicas_or_lengths_that_change_are_planned_for_at_once(planner: Planner) -> None:
    now = run(planner, 0, 20, l64=10)
    plan(planner, now, 4)
    assert planner.due(now, 4, LENGTHS) is None
    assert planner.due(now, 5, LENGTHS) == "replicas"
    assert planner.due(now, 4, LENGTHS[1:]) == "lengths"


def test_a_shift_is_planned_for_at_once_and_the_past_forgotten(planner: Planner) -> None:
    now = run(planner, 0, 50, l64=20)
    plan(planner, now, 4)
    now = run(planner, now, 15, l500=20)
    assert planner.due(now, 4, LENGTHS) in ("shift", "period")
    plan(planner, now, 4)
    assert planner.plan
    assert planner.plan.demand[512] > 10 * planner.plan.demand[64]


def test_where_nothing_arrives_the_last_demand_stands(planner: Planner) -> None:
    now = run(planner, 0, 20, l64=10)
    plan(planner, now, 4)
    plan(planner, now + 1000, 5)
    assert planner.plan
    assert planner.plan.demand[64] == pytest.approx(10)


def test_with_room_for_all_each_replica_holds_all_and_has_texts_that_it_is_to_have_first() -> None:
    one = Planner(512, 1.0)
    residents = Planner(512, 1.0, residency=Residency(dict.fromkeys(LENGTHS, 10.0), 10.0 * len(LENGTHS)))
    for planner in (one, residents):
        now = run(planner, 0, 20, l64=10, l500=1)
        plan(planner, now, 6)
        assert planner.plan
        assert sum(planner.plan.counts.values()) == sum(planner.plan.configurations.values()) == 6
        assert tuple(planner.plan.counts) == LENGTHS
        assert planner.due(now, 6, LENGTHS) is None
    assert one.plan
    assert residents.plan
    assert all(held == (home,) for home, held in one.plan.configurations)
    assert all(held == LENGTHS for _, held in residents.plan.configurations)
    assert one.plan.predicted.keys() == {"predicted_latency_s"}
    assert residents.plan.predicted.keys() == {"predicted_load", "least_load"}


def test_a_quantile_of_demand_provides_for_bursts() -> None:
    mean, high = Planner(512, 1.0), Planner(512, 1.0, quantile=0.95)
    for planner in (mean, high):
        for second in range(100):
            planner.observe(second + 1, {64: 100 if second % 10 == 0 else 1})
        plan(planner, 100, 10)
    assert mean.plan
    assert high.plan
    assert high.plan.demand[64] == pytest.approx(100)
    assert mean.plan.demand[64] == pytest.approx(10.9)


lengths = st.lists(st.integers(1, 8192), min_size=1, max_size=20, unique=True)
replicas = st.integers(0, 100)


@given(lengths, replicas)
def test_even_with_the_longest_first(held: list[int], count: int) -> None:
    plan = even_plan(held, count)
    counts = Counter(plan)
    assert len(plan) == count
    assert plan[:1] == (max(held),)[:count]
    assert counts.keys() <= set(held)
    assert max(counts[length] for length in held) - min(counts[length] for length in held) <= 1


@given(lengths, replicas, replicas)
def test_more_replicas_change_no_earlier_rank(held: list[int], count: int, more: int) -> None:
    assert even_plan(held, count + more)[:count] == even_plan(held, count)


@given(lengths, replicas)
def test_neither_order_nor_repetition_matters(held: list[int], count: int) -> None:
    assert even_plan(held, count) == even_plan(sorted(held) * 2, count)


def test_few_replicas_span_the_range() -> None:
    assert even_plan(range(64, 513, 64), 9) == (512, 256, 384, 128, 448, 192, 320, 64, 512)


@pytest.mark.parametrize(("held", "count"), [([], 1), ([64], -1)])
def test_impossible_plans(held: list[int], count: int) -> None:
    with pytest.raises(ValueError, match="at least one length"):
        even_plan(held, count)
