"""What a decode step takes by its rows, learned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.llm.step_cost import StepCost


@given(st.floats(0.001, 0.05), st.floats(0, 0.005), st.integers(0, 99))
def test_both_parts_are_found_once_rows_vary(step_s: float, row_s: float, seed: int) -> None:
    cost = StepCost()
    for rows in np.random.default_rng(seed).uniform(1, 30, 200):
        cost.observe(rows, step_s + row_s * rows)
    assert cost.step_s == pytest.approx(step_s, rel=1e-3)
    assert cost.row_s == pytest.approx(row_s, rel=1e-3, abs=1e-6)


@given(st.lists(st.tuples(st.floats(1, 64), st.floats(1e-4, 1)), min_size=1, max_size=50))
def test_neither_part_is_negative_and_the_mean_is_right(steps: list[tuple[float, float]]) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
    assert cost.step_s >= 0
    assert cost.row_s >= 0
    weights = 0.98 ** np.arange(len(steps) - 1, -1, -1)
    rows, seconds = np.average(np.array(steps), axis=0, weights=weights)
    assert cost.step_s + cost.row_s * rows == pytest.approx(seconds)


def test_what_a_row_costs_is_remembered_while_rows_stay() -> None:
    cost = StepCost()
    for rows in [*range(1, 31), *[8] * 500]:
        cost.observe(rows, 0.02 + 0.001 * rows)
    assert cost.row_s == pytest.approx(0.001, rel=0.01)
    assert cost.step_s == pytest.approx(0.02, rel=0.01)


def test_with_the_same_rows_always_a_row_costs_nothing_beside_its_step() -> None:
    cost = StepCost()
    assert (cost.known, cost.step_s, cost.row_s) == (False, 0.0, 0.0)
    cost.observe(4, 0.02)
    cost.observe(4, 0.02)
    assert (cost.step_s, cost.row_s) == (pytest.approx(0.02), 0.0)
    with pytest.raises(ValueError, match="positive"):
        cost.observe(0, 0.02)
