"""What each gamma costs and gives (OTAS §III-A)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pliant.policies.vision.token_profile import TokenProfile


def latency(gamma: int, rows: int) -> float:
    return math.inf if gamma == 8 and rows > 2 else 0.01 * (2 + rows) * (1 + gamma / 10)


def profile() -> TokenProfile:
    accuracies = {"digits": {-5: 0.5, 0: 0.8, 8: 0.9}, "parity": {-5: 0.75, 0: 1.0}}
    return TokenProfile([0, 8, -5], latency, lambda task, gamma: accuracies[str(task)].get(gamma), most_rows=4)


def test_latencies_are_those_of_a_batch_in_one_pass() -> None:
    known = profile()
    assert known.gammas == (-5, 0, 8)
    assert known.latency(0, 4) == pytest.approx(0.06)
    assert known.latency(8, 3) == math.inf
    assert known.shortest_s == pytest.approx(0.015)
    assert known.row_s() == pytest.approx([0.03 / 4, 0.06 / 4, 0.072 / 2])
    known.slowdown = 2.0
    assert known.latency(0, 4) == pytest.approx(0.12)
    assert known.shortest_s == pytest.approx(0.03)


def test_queries_earn_their_utility_times_the_accuracy_of_their_task() -> None:
    known = profile()
    earned = known.utility([[("digits", 1.0), ("digits", 3.0)], [("digits", 1.0), ("parity", 2.0)], []])
    assert earned == pytest.approx(np.array([[2.0, 3.2, 3.6], [2.0, 2.8, np.nan], [0, 0, 0]]), nan_ok=True)


def test_nonsense_is_refused() -> None:
    known = profile()
    with pytest.raises(IndexError, match="1 to 4 rows, got 5"):
        known.latency(0, 5)
    with pytest.raises(IndexError, match="got 0"):
        known.latency(0, 0)
    with pytest.raises(ValueError, match="not in tuple"):
        known.latency(3, 1)
    with pytest.raises(ValueError, match="needs a gamma"):
        TokenProfile([], latency, lambda task, gamma: 1.0)
    for wrong in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="latencies must be positive"):
            TokenProfile([0], lambda gamma, rows, wrong=wrong: wrong, lambda task, gamma: 1.0)  # type: ignore[misc]
