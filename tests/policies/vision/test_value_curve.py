"""The curve of a vision service against the linear program itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from pliant.policies.vision.token_profile import TokenProfile
from pliant.policies.vision.value_curve import USED, Asked, earnings, row_seconds, steps, value_curve


def program(row_s: np.ndarray, demand: dict[str, tuple[float, np.ndarray]], seconds: float) -> float:
    solver = pywraplp.Solver.CreateSolver("GLOP")
    used, earned = [], []
    for rate, gains in demand.values():
        shares = [solver.NumVar(0, rate, "") for _ in row_s]
        solver.Add(solver.Sum(shares) <= rate)
        for share, row, gain in zip(shares, row_s.tolist(), gains.tolist(), strict=True):
            if np.isnan(gain) or np.isinf(row):
                solver.Add(share == 0)
            else:
                used.append(share * row)
                earned.append(share * gain)
    solver.Add(solver.Sum(used) <= seconds)
    solver.Maximize(solver.Sum(earned))
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return float(solver.Objective().Value())


gains = st.one_of(st.floats(0, 1), st.just(float("nan")))
tasks = st.lists(st.tuples(st.floats(0.1, 50), st.lists(gains, min_size=4, max_size=4)), min_size=1, max_size=3)


@given(st.lists(st.one_of(st.floats(0.001, 0.2), st.just(np.inf)), min_size=4, max_size=4), tasks, st.floats(0, 8))
@settings(max_examples=150, deadline=None)
def test_equals_the_linear_program(row_s: list[float], tasks: list[tuple[float, list[float]]], seconds: float) -> None:
    demand = {str(at): (rate, np.array(gain)) for at, (rate, gain) in enumerate(tasks)}
    taken, earned = steps(np.array(row_s), demand)
    best = program(np.array(row_s), demand, seconds)
    assert float(np.interp(seconds, taken, earned)) == pytest.approx(best, rel=1e-6, abs=1e-6)


def test_more_replicas_earn_less_and_less_more() -> None:
    row_s = np.array([0.004, 0.008, 0.012])
    demand = {"digits": (400.0, np.array([0.8, 0.93, 0.97])), "photos": (200.0, np.array([0.5, 0.8, 0.9]))}
    curve = value_curve(row_s, demand, 20, spread=0.3, window_s=0.5)
    assert curve[0] == 0
    assert (np.diff(curve) >= -1e-9).all()
    assert (np.diff(curve, 2) <= 1e-9).all()
    assert curve[-1] == pytest.approx(400 * 0.97 + 200 * 0.9, rel=0.01)
    assert value_curve(row_s, demand, 2)[2] == pytest.approx(np.interp(2 * USED, *steps(row_s, demand)))


def test_batches_must_fit_into_the_slo_twice() -> None:
    profile = TokenProfile([-4, 0], lambda gamma, rows: (0.01 if gamma else 0.02) * (1 + rows), lambda *_: 1.0, 8)
    assert row_seconds(profile, 0.2).tolist() == pytest.approx([0.01 * 9 / 8, 0.02 * 5 / 4])
    assert row_seconds(profile, 0.05)[1] == np.inf


def test_earnings_are_of_the_mix_that_came() -> None:
    accuracies = {"digits": {-4: 0.8, 0: 0.9, 2: 0.95}, "plain": {-4: 0.5, 0: 0.7}}
    profile = TokenProfile(
        [-4, 0, 2], lambda gamma, rows: 0.01 * (5 + gamma), lambda task, gamma: accuracies[str(task)].get(gamma), 1
    )
    assert earnings(profile, []) == []
    asked = [Asked("digits", 1.0, 1.0), Asked("digits", 3.0, 1.0), Asked("plain", 2.0, 0.1), Asked("plain", 2.0, 9.0)]
    seconds, earned = zip(*earnings(profile, asked), strict=True)
    assert seconds == pytest.approx((0.01, 0.05, 0.07))
    assert earned == pytest.approx(
        [(4 * digits + 4 * plain) / 4 for digits, plain in ((0.8, 0.5), (0.9, 0.7), (0.95, 0.7))]
    )
    assert len(earnings(profile, [Asked("digits", 1.0, 0.1)])) == 2, "two batches of the slowest are late"
    assert earnings(profile, [Asked("digits", 1.0, 0.01)]) == []
