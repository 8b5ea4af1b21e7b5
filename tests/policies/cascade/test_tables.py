"""Tables that do not fit together, or make no sense, are refused; one model is what all others are held against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.tables import LevelProfile, Reading, check, reference

LABELS = np.array([0, 1, 2, 3] * 5)
READING = Reading(np.tile([0.7, 0.1, 0.1, 0.1], (20, 1)), np.full(20, 0.001))
LEVEL = LevelProfile("small", 1.0, READING, np.zeros(20))


def test_tables_that_fit_are_taken() -> None:
    check([LEVEL, replace(LEVEL, name="large", importance_s=None)], LABELS)


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        check([LEVEL, LEVEL], LABELS)
    with pytest.raises(ValueError, match="from 0 to 3, got 1 to 4"):
        check([LEVEL], LABELS + 1)
    with pytest.raises(ValueError, match="integers"):
        check([LEVEL], LABELS / 2)
    short = LevelProfile("short", 1.0, Reading(READING.probabilities[1:], READING.latency_s[1:]))
    with pytest.raises(ValueError, match=r"short: needs probabilities \(20, 4\)"):
        check([LEVEL, short], LABELS)


@pytest.mark.parametrize("row", [[1.0, 1.0, 1.0, 1.0], [1.5, -0.5, 0.0, 0.0], [np.nan, 0.0, 0.0, 1.0]])
def test_what_is_no_probability_is_refused(row: list[float]) -> None:
    probabilities = READING.probabilities.copy()
    probabilities[7] = row
    with pytest.raises(ValueError, match="small: probabilities must be at least 0, and those of a text add up to 1"):
        check([replace(LEVEL, reading=replace(READING, probabilities=probabilities))], LABELS)


@pytest.mark.parametrize("seconds", [0.0, -1.0, np.inf, np.nan])
def test_what_is_no_latency_is_refused(seconds: float) -> None:
    latency_s = READING.latency_s.copy()
    latency_s[3] = seconds
    with pytest.raises(ValueError, match="small: latencies must be above 0 s and finite"):
        check([replace(LEVEL, reading=replace(READING, latency_s=latency_s))], LABELS)


@pytest.mark.parametrize("importance_s", [np.zeros(19), np.full(20, -1.0), np.full(20, np.inf)])
def test_what_is_no_time_to_tell_is_refused(importance_s: np.ndarray) -> None:
    with pytest.raises(ValueError, match="small: needs a time to tell of at least 0 s for each text"):
        check([replace(LEVEL, importance_s=importance_s)], LABELS)


@pytest.mark.parametrize("handed_s", [-1e-6, np.inf, np.nan])
def test_what_is_no_time_for_a_text_from_another_model_is_refused(handed_s: float) -> None:
    with pytest.raises(ValueError, match="small: needs at least 0 s for a text from another model"):
        check([replace(LEVEL, handed_s=handed_s)], LABELS)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=6))
def test_the_reference_is_the_most_accurate_and_of_those_the_fastest(models: list[tuple[int, int]]) -> None:
    accuracies, latencies = zip(*models, strict=True)
    accuracy, seconds = models[reference(accuracies, latencies)]
    assert accuracy == max(accuracies)
    assert seconds == min(latency for other, latency in models if other == accuracy)
