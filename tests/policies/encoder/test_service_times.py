"""Service times that are known for some lengths only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.service_times import LengthTimes, service_times

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


def test_what_was_measured_is_believed_until_something_newer_is() -> None:
    times = LengthTimes()
    times.learn({4: 1.0, 16: 3.0})
    for _ in range(10_000):
        times.learn({16: 3.0})
    assert times.known == {4: 1.0, 16: 3.0}
    times.learn({4: 2.0})
    assert times.known[4] == 2.0


def test_what_nobody_holds_changes_with_what_is_held() -> None:
    times = LengthTimes()
    times.learn({4: 1.0, 8: 2.0, 16: 3.0})
    times.learn({16: 6.0})
    assert times.known == {4: 2.0, 8: 4.0, 16: 6.0}
    times.learn({8: 2.0})
    assert times.known == {4: 1.0, 8: 2.0, 16: 3.0}, "the machine is as fast as before"


def test_what_tells_nothing_of_others_leaves_them_as_they_were() -> None:
    times = LengthTimes()
    times.learn({4: 1.0})
    times.learn({16: 9.0})
    assert times.known == {4: 1.0, 16: 9.0}


@given(st.lists(st.dictionaries(st.sampled_from([8, 16, 32]), st.floats(0.1, 10.0), min_size=1), max_size=20))
def test_ups_and_downs_of_others_leave_no_trace(between: list[dict[int, float]]) -> None:
    times = LengthTimes()
    times.learn({4: 1.0, 8: 2.0, 16: 3.0, 32: 4.0})
    for held in between:
        times.learn(held)
    times.learn({8: 2.0, 16: 3.0, 32: 4.0})
    assert times.known == {4: 1.0, 8: 2.0, 16: 3.0, 32: 4.0}
