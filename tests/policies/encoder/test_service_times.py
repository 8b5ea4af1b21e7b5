"""Service times that are known for some lengths only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.service_times import service_times

KNOWN = st.dictionaries(st.integers(1, 512), st.floats(1e-4, 10.0), min_size=1)
LENGTHS = st.lists(st.integers(1, 1024), min_size=1, unique=True).map(sorted)


def test_in_between_and_outside() -> None:
    filled = service_times([32, 64, 96, 128, 256], {64: 1.0, 128: 3.0})
    assert filled == {32: 0.5, 64: 1.0, 96: 2.0, 128: 3.0, 256: 6.0}


def test_a_shorter_runtime_never_takes_more() -> None:
    assert service_times([64, 128], {64: 2.0, 128: 1.5}) == {64: 1.5, 128: 1.5}


def test_a_profile_is_scaled_to_what_was_observed() -> None:
    profiled = {64: 1.0, 128: 2.0, 256: 4.0, 512: 8.0}
    assert service_times([64, 512], {}, profiled) == {64: 1.0, 512: 8.0}
    assert service_times([64, 128, 512], {128: 3.0}, profiled) == {64: 1.5, 128: 3.0, 512: 12.0}


@given(KNOWN, LENGTHS)
def test_all_lengths_get_a_positive_time_that_does_not_fall(known: dict[int, float], lengths: list[int]) -> None:
    filled = service_times(lengths, known)
    assert list(filled) == lengths
    assert all(seconds > 0 for seconds in filled.values())
    assert list(filled.values()) == sorted(filled.values())


def test_nothing_known() -> None:
    with pytest.raises(ValueError, match="at least one"):
        service_times([64], {})
