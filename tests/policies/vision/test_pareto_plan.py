"""The best plan: as brute force finds it, never below Algorithm 2; within a proven loss where labels are too many."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.vision import pareto_plan
from pliant.policies.vision.one_clock_plan import algorithm_2
from pliant.policies.vision.pareto_plan import LOSS, Plan, best_plan
from pliant.policies.vision.plan_bound import Option, PlanBound
from pliant.policies.vision.token_profile import Floats


class Problem(NamedTuple):
    latency_s: Floats
    gain: Floats
    due: list[float]


def gained(problem: Problem, choices: list[int | None], now: float = 0.0) -> float:
    """What a plan gains, if it is in time."""
    total = 0.0
    for seconds, gains, due, choice in zip(*problem, choices, strict=True):
        if choice is not None:
            now += seconds[choice]
            assert now <= due
            total += gains[choice]
    return total


def brute_force(problem: Problem, now: float = 0.0) -> float:
    def best(batch: int, now: float) -> float:
        if batch == len(problem.due):
            return 0.0
        runs = zip(problem.latency_s[batch].tolist(), problem.gain[batch].tolist(), strict=True)
        ends = [(now + seconds, gain) for seconds, gain in runs if now + seconds <= problem.due[batch]]
        return max([best(batch + 1, now), *(gain + best(batch + 1, end) for end, gain in ends)])

    return best(0, now)


def like_images(batches: int, seed: int, horizon_s: float = 1.0) -> Problem:
    """As a vision transformer's eight gammas are."""
    random = np.random.default_rng(seed)
    per_s = np.array([1300, 1000, 800, 680, 580, 540, 500, 440])
    accuracy = np.array([0.85, 0.925, 0.938, 0.943, 0.945, 0.957, 0.96, 0.962])
    rows = random.integers(1, 65, batches)
    earned = np.array([random.choice([0.01, 0.2, 0.3, 1.0], n).sum() for n in rows])
    gain = earned[:, None] * accuracy * random.uniform(0.99, 1.01, (batches, 8))
    return Problem(0.01 + rows[:, None] / per_s, gain, np.sort(random.uniform(0.05, horizon_s, batches)).tolist())


def in_proportion(batches: int, seed: int) -> Problem:
    """Gains like the seconds: hardly a label dominates another."""
    random = np.random.default_rng(seed)
    seconds = np.sort(random.uniform(0.5, 1.5, (batches, 5)), axis=1)
    gain = seconds * random.uniform(0.98, 1.02, seconds.shape)
    return Problem(seconds, gain, np.sort(random.uniform(0.1, 0.6, batches) * batches).tolist())


SMALL = st.integers(0, 5).flatmap(
    lambda batches: st.builds(
        lambda seconds, gains, due: Problem(
            np.array(seconds, np.float64).reshape(-1, 3), np.array(gains, np.float64).reshape(-1, 3), sorted(due)
        ),
        st.lists(st.sampled_from([1, 2, 3, 5, 8, float("inf")]), min_size=3 * batches, max_size=3 * batches),
        st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), min_size=3 * batches, max_size=3 * batches),
        st.lists(st.sampled_from([0, 1, 3, 4, 6, 9, 14]), min_size=batches, max_size=batches),
    )
)


@given(SMALL)
@settings(max_examples=120)
def test_small_plans_are_the_best_there_are(problem: Problem) -> None:
    plan = best_plan(0.0, *problem)
    assert plan.gain == gained(problem, plan.choices) == brute_force(problem)
    assert plan.loss == 0


@pytest.mark.parametrize("seed", range(20))
def test_real_plans_are_the_best_there_are_too(seed: int) -> None:
    problem = like_images(5, seed, horizon_s=0.3)
    now = 0.01 * seed
    plan = best_plan(now, *problem)
    assert plan.gain == pytest.approx(gained(problem, plan.choices, now), abs=1e-9)
    assert plan.gain == pytest.approx(brute_force(problem, now))
    assert plan.loss == 0


def test_a_slow_and_rich_start_is_weighed_against_what_it_blocks() -> None:
    """Where Algorithm 2 falls short: it remembers one clock for each batch and gamma, here that of the richer way."""
    problem = Problem(
        np.array([[1.0, 2.0], [1.0, 9.0], [1.0, 9.0]]), np.array([[5.0, 6.0], [1.0, 0], [9.0, 0]]), [2, 3, 3]
    )
    assert best_plan(0.0, *problem) == Plan([0, 0, 0], 15.0, 0.0)


def written(problem: Problem) -> float:
    """What Algorithm 2's plan gains, of what is in time."""
    now, total = 0.0, 0.0
    for seconds, gains, due, choice in zip(*problem, algorithm_2(0.0, *problem), strict=True):
        if choice is not None and now + seconds[choice] < due:
            now += seconds[choice]
            total += gains[choice]
    return total


def test_algorithm_2_never_gains_more_and_sometimes_less() -> None:
    shares = []
    for seed, batches in itertools.product(range(10), (4, 16, 40)):
        problem = like_images(batches, seed, horizon_s=0.5)
        best = best_plan(0.0, *problem).gain
        assert best >= written(problem) * (1 - 1e-12)
        shares.append(written(problem) / best)
    assert min(shares) < 0.999


@pytest.mark.parametrize("seed", range(6))
def test_as_many_batches_as_can_wait_are_planned_with_a_proven_loss(seed: int) -> None:
    problem = like_images(64, seed, horizon_s=3.0)
    plan = best_plan(0.0, *problem)
    assert plan.loss <= LOSS
    assert plan.gain == pytest.approx(gained(problem, plan.choices))


@pytest.mark.parametrize("seed", range(6))
def test_too_many_labels_cost_at_most_the_stated_loss(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = in_proportion(12, seed)
    monkeypatch.setattr(pareto_plan, "WIDTH", 10**9)
    best = best_plan(0.0, *problem)
    assert best.loss == 0
    monkeypatch.setattr(pareto_plan, "WIDTH", 8)
    plan = best_plan(0.0, *problem)
    assert plan.loss <= LOSS
    assert best.gain / (1 + LOSS) <= plan.gain <= best.gain * (1 + 1e-12)
    assert plan.gain == pytest.approx(gained(problem, plan.choices))
    assert plan.gain >= written(problem)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("loss", "most_labels"), [(0.001, 4), (0.3, 4), (0.3, 10**6)])
def test_a_plan_tells_what_it_may_lose(
    seed: int, loss: float, most_labels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = in_proportion(12, seed)
    monkeypatch.setattr(pareto_plan, "WIDTH", 10**9)
    best = best_plan(0.0, *problem).gain
    monkeypatch.setattr(pareto_plan, "LOSS", loss)
    monkeypatch.setattr(pareto_plan, "WIDTH", 4)
    monkeypatch.setattr(pareto_plan, "MOST_LABELS", most_labels * 12)
    monkeypatch.setattr(pareto_plan, "_BEAM", 2)
    plan = best_plan(0.0, *problem)
    assert plan.gain <= best * (1 + 1e-12)
    assert best <= plan.gain * (1 + plan.loss) * (1 + 1e-12)
    assert plan.gain == pytest.approx(gained(problem, plan.choices))
    assert plan.gain >= written(problem)


@given(SMALL, st.integers(0, 8))
@settings(max_examples=100)
def test_no_rest_of_a_plan_gains_more_than_its_bound(problem: Problem, start: int) -> None:
    rows = zip(problem.latency_s.tolist(), problem.gain.tolist(), problem.due, strict=True)
    options = []
    for seconds, gains, due in rows:
        points = sorted(((s, g) for s, g in zip(seconds, gains, strict=True) if s <= due), key=lambda p: (p[0], -p[1]))
        rising = [(0.0, 0.0)]
        for point in points:
            if point[1] > rising[-1][1]:
                rising.append(point)
        ends, worth = (np.array(column) for column in zip(*rising, strict=True))
        options.append(Option(np.arange(len(rising)) - 1, ends, worth))
    bound = PlanBound(0.0, options, problem.due)
    for batch in range(len(problem.due)):
        rest = Problem(problem.latency_s[batch + 1 :], problem.gain[batch + 1 :], problem.due[batch + 1 :])
        most = bound.after(batch, np.array([float(start)]))[0]
        assert most >= brute_force(rest, float(start)) - 1e-9


def test_the_bound_is_what_batches_gain_that_could_run_in_part() -> None:
    half = Option(np.array([-1, 0]), np.array([0.0, 2.0]), np.array([0.0, 4.0]))
    assert PlanBound(0.0, [half] * 3, [3.0, 3.0, 3.0]).after(0, np.array([0.0, 1.0, 2.5, 4.0])) == pytest.approx(
        [6.0, 4.0, 1.0, 0.0]
    )


def test_nothing_to_plan_and_nothing_in_time() -> None:
    assert best_plan(0.0, np.empty((0, 2)), np.empty((0, 2)), []) == Plan([], 0.0, 0.0)
    assert best_plan(5.0, np.ones((1, 1)), np.ones((1, 1)), [5.5]) == Plan([None], 0.0, 0.0)


def test_batches_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in the order in which they are due"):
        best_plan(0.0, np.ones((2, 1)), np.ones((2, 1)), [2.0, 1.0])
    with pytest.raises(ValueError, match=r"got shapes \(2, 1\) and \(1, 1\)"):
        best_plan(0.0, np.ones((2, 1)), np.ones((1, 1)), [1.0, 2.0])
