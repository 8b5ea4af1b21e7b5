"""What each gamma costs and gives (OTAS §III-A)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pliant.policies.vision.token_profile import Floats, TokenProfile, dominated


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


GAMMAS = (-10, -5, 0, 2, 4)


def costs(*latencies: float) -> Floats:
    """Of batches of one and of ten."""
    return np.array([[latency, 10 * latency] for latency in latencies])


def test_what_is_faster_or_more_accurate_than_all_others_stays() -> None:
    assert dominated(GAMMAS, costs(1, 2, 3, 4, 5), np.array([[0.5, 0.6, 0.7, 0.8, 0.9]])) == {}


def test_what_is_slower_and_less_accurate_goes() -> None:
    accuracy = np.array([[0.5, 0.6, 0.7, 0.65, 0.9], [0.5, 0.5, 0.7, 0.7, 0.7]])
    assert dominated(GAMMAS, costs(1, 2, 3, 4, 5), accuracy) == {2: 0}
    assert dominated(GAMMAS, costs(4, 3, 3, 4, 5), accuracy) == {-10: 0, -5: 0, 2: 0}


def test_one_task_or_one_size_of_batch_is_reason_enough_to_stay() -> None:
    accuracy = np.array([[0.5, 0.6, 0.7, 0.6, 0.9], [0.5, 0.5, 0.7, 0.71, 0.7]])
    assert dominated(GAMMAS, costs(1, 2, 3, 4, 5), accuracy) == {}
    accuracy = np.array([[0.5, 0.6, 0.7, 0.6, 0.9]])
    latency = costs(1, 2, 3, 4, 5)
    latency[3, 1] = latency[1, 1] - 1
    assert dominated(GAMMAS, latency, accuracy) == {}


def test_of_equals_the_one_nearest_to_the_plain_model_stays() -> None:
    same = np.full((2, 5), 0.9)
    assert dominated(GAMMAS, costs(1, 1, 1, 1, 1), same) == {-10: 0, -5: 0, 2: 0, 4: 0}
    assert dominated((-2, 2), costs(1, 1), same[:, :2]) == {2: -2}


def test_prompts_that_a_task_lacks_replace_none_that_it_has() -> None:
    accuracy = np.array([[0.5, 0.5, 0.9, 0.9, math.nan], [0.5, 0.5, 0.8, math.nan, 0.9]])
    assert dominated(GAMMAS, costs(1, 1, 5, 3, 2), accuracy) == {-10: -5}
    accuracy[1, 3] = 0.8
    assert dominated(GAMMAS, costs(1, 1, 5, 3, 2), accuracy) == {-10: -5, 0: 2}


def test_what_does_not_fit_into_memory_is_slow() -> None:
    latency = np.array([[1, 2], [2, math.inf], [2, math.inf]])
    assert dominated((0, 2, 4), latency, np.array([[0.8, 0.8, 0.7]])) == {2: 0, 4: 0}
    assert dominated((0, 2, 4), latency, np.array([[0.8, 0.9, 0.85]])) == {4: 2}


def test_without_tasks_nothing_is_useless() -> None:
    assert dominated(GAMMAS, costs(1, 1, 1, 1, 1), np.empty((0, 5))) == {}


@given(
    latency=arrays(np.float64, (5, 2), elements=st.sampled_from([1.0, 2.0, 3.0, math.inf])),
    accuracy=arrays(np.float64, (2, 5), elements=st.sampled_from([0.5, 0.6, 0.7, math.nan])),
)
def test_whatever_a_dropped_gamma_could_do_one_that_stays_does_as_well(latency: Floats, accuracy: Floats) -> None:
    found = dominated(GAMMAS, latency, accuracy)
    assert not found.keys() & set(found.values())
    for gamma, other in found.items():
        dropped, kept = GAMMAS.index(gamma), GAMMAS.index(other)
        assert (latency[kept] <= latency[dropped]).all()
        assert (np.isnan(accuracy[:, dropped]) | (accuracy[:, kept] >= accuracy[:, dropped])).all()
    stay = [index for index, gamma in enumerate(GAMMAS) if gamma not in found]
    assert dominated([GAMMAS[index] for index in stay], latency[stay], accuracy[:, stay]) == {}
