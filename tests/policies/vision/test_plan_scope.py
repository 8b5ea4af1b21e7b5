"""Which of many batches are planned (OTAS §III-D)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.vision.plan_scope import HORIZON, horizon


def of(seconds: list[float], gain: list[float], due: list[float]) -> list[int]:
    """With two gammas, of which the second takes three times as long, for twice as much."""
    return horizon(0.0, np.array(seconds)[:, None] * [1.0, 3.0], np.array(gain)[:, None] * [1.0, 2.0], due)


def test_a_short_queue_is_planned_as_a_whole() -> None:
    assert of([9.0] * HORIZON, [0.0] * HORIZON, [1.0] * HORIZON) == list(range(HORIZON))


def test_those_that_are_due_first_where_there_is_time_for_all() -> None:
    assert of([0.1] * 60, list(range(1, 61)), [6.1] * 60) == list(range(HORIZON))


def test_those_that_gain_most_per_second_where_there_is_not() -> None:
    assert of([0.1] * 60, [1.0] * 50 + [9.0] * 10, [1.05] * 60) == list(range(50, 60))
    assert of([0.5] * 50 + [0.1] * 10, [2.0] * 60, [1.05] * 60) == list(range(50, 60))


def test_what_gains_nothing_is_not_planned() -> None:
    assert of([0.1] * 60, [0.0] * 59 + [1.0], [100.0] * 60) == [59]


@given(st.integers(0, 10**6), st.integers(HORIZON + 1, 60))
@settings(max_examples=40)
def test_what_is_planned_could_all_run_in_time(seed: int, batches: int) -> None:
    random = np.random.default_rng(seed)
    seconds, due = random.uniform(0.01, 0.2, batches), np.sort(random.uniform(0.02, 4.0, batches))
    chosen = of(seconds.tolist(), random.exponential(1.0, batches).tolist(), due.tolist())
    assert 0 < len(chosen) <= HORIZON
    assert chosen == sorted(set(chosen))
    assert (seconds[chosen].cumsum() <= due[chosen] + 1e-9).all()
