"""Latencies as a rising function of length, against the definition of isotonic regression, and among outliers."""

from __future__ import annotations

from statistics import median_low

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cascade.latency import RisingLatency

READ = st.lists(st.tuples(st.integers(1, 12), st.floats(0.001, 1.0)), min_size=1, max_size=40)


@given(READ)
def test_medians_are_made_to_rise_as_the_definition_says(read: list[tuple[int, float]]) -> None:
    tokens = sorted({length for length, _ in read})
    rows = [[seconds for length, seconds in read if length == wanted] for wanted in tokens]

    def median(first: int, last: int) -> float:
        return median_low(seconds for row in rows[first : last + 1] for seconds in row)

    expected = [
        max(min(median(first, last) for last in range(place, len(tokens))) for first in range(place + 1))
        for place in range(len(tokens))
    ]
    fitted = RisingLatency(*zip(*read, strict=True))
    np.testing.assert_array_equal(fitted(tokens), expected)
    assert (np.diff(fitted(np.arange(0, 20))) >= 0).all()


@given(st.floats(0, 0.01), st.floats(1e-6, 0.01))
def test_between_lengths_it_is_linear_and_beyond_them_constant(start_s: float, each_s: float) -> None:
    read = np.array([4, 10, 30])
    fitted = RisingLatency(read, start_s + each_s * read)
    np.testing.assert_allclose(fitted([7, 20]), start_s + each_s * np.array([7, 20]))
    np.testing.assert_allclose(fitted([[1, 99]]), start_s + each_s * np.array([[4, 30]]))


def test_what_a_machine_did_to_some_texts_is_gone_and_steps_stay() -> None:
    tokens = np.tile(np.arange(1, 65), 15)
    runtime_s = np.where(tokens <= 32, 0.002, 0.004)
    busy = np.random.default_rng(0).random(len(tokens)) < 0.2
    fitted = RisingLatency(tokens, runtime_s + 0.05 * busy)
    np.testing.assert_allclose(fitted([1, 32, 33, 64]), [0.002, 0.002, 0.004, 0.004])


@pytest.mark.parametrize(("tokens", "seconds"), [([], []), ([1, 2], [0.1])])
def test_readings_without_lengths_are_refused(tokens: list[int], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="length and the seconds of at least one text"):
        RisingLatency(tokens, seconds)
