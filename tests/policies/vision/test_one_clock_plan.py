"""Algorithms 2 and 3 as the paper writes them, with what is wrong with them (OTAS §III-D)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pliant.policies.vision.one_clock_plan import algorithm_2, algorithm_3

FAST, RICH = [1.0, 2.0], [5.0, 6.0]


def test_time_is_spent_where_it_is() -> None:
    latency_s, utility = np.array([FAST, FAST]), np.array([RICH, RICH])
    assert algorithm_2(0.0, latency_s, utility, [2.5, 4.5]) == [1, 1]
    assert algorithm_2(0.0, latency_s, utility, [2.5, 3.5]) == [1, 0]
    assert algorithm_2(0.0, latency_s, utility, [1.5, 2.5]) == [0, 0]
    assert algorithm_2(1.0, latency_s, utility, [3.5, 5.5]) == [1, 1]


def test_a_batch_that_ends_just_when_it_is_due_is_late() -> None:
    assert algorithm_2(0.0, np.array([FAST]), np.array([RICH]), [2.0]) == [0]


def test_a_batch_may_give_way_to_a_better_one() -> None:
    latency_s, utility = np.array([[2.0], [2.0]]), np.array([[1.0], [5.0]])
    assert algorithm_2(0.0, latency_s, utility, [2.5, 3.0]) == [None, 0]


def test_one_clock_forgets_the_faster_way() -> None:
    """The first batch is remembered at its richest before the second, and so the third is not in time."""
    latency_s = np.array([[1.0, 2.0], [1.0, 9.0], [1.0, 9.0]])
    utility = np.array([[5.0, 6.0], [1.0, 0.0], [9.0, 0.0]])
    assert algorithm_2(0.0, latency_s, utility, [2.5, 3.5, 3.5])[0] == 1
    assert algorithm_2(0.0, latency_s, utility, [2.5, 3.5, 3.5]).count(None) == 1


def test_what_no_way_adds_to_points_to_the_first_gamma() -> None:
    """S is 1 from the start (line 6): the first batch is said to run though nothing is in time for it."""
    latency_s, utility = np.array([[3.0], [1.0]]), np.array([[5.0], [5.0]])
    assert algorithm_2(0.0, latency_s, utility, [2.0, 2.5]) == [None, 0]
    assert algorithm_2(0.0, np.array([[3.0], [3.0]]), utility, [2.0, 2.5]) == [0, None]


def test_a_gamma_that_a_batch_cannot_have_is_not_chosen() -> None:
    latency_s = np.array([[1.0, math.inf], [1.0, 2.0]])
    assert algorithm_2(0.0, latency_s, np.array([[5.0, 0.0], RICH]), [9.0, 9.0]) == [0, 1]
    assert algorithm_3(0.0, latency_s, [1.0, 1.0], [9.0, 9.0], usual=1) == [0, 1]
    assert algorithm_3(0.0, latency_s, [0.1, 0.1], [9.0, 9.0], usual=1) == [0, 1]
    assert algorithm_3(0.0, np.full((1, 2), math.inf), [0.1], [9.0], usual=0) == [None]


@pytest.mark.parametrize(
    ("mean_utility", "due", "expected"),
    [([0.3, 0.3], [9.0, 9.0], [1, 1]), ([0.9, 0.8], [9.0, 9.0], [2, 1]), ([0.9, 0.3], [2.0, 9.0], [0, 1])],
)
def test_the_rate_decides_unless_a_batch_is_late_or_worth_much(
    mean_utility: list[float], due: list[float], expected: list[int]
) -> None:
    latency_s = np.array([[1.0, 2.0, 3.0]] * 2)
    assert algorithm_3(0.0, latency_s, mean_utility, due, usual=1) == expected


def test_each_batch_waits_for_those_before_it() -> None:
    assert algorithm_3(0.0, np.array([FAST] * 3), [0.3] * 3, [4.5] * 3, usual=1) == [1, 1, 0]
