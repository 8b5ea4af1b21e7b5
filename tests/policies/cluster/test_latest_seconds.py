"""Requests by second, as several gateways tell of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.latest_seconds import LatestSeconds


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 40)), max_size=200), st.integers(1, 20))
def test_what_gateways_tell_in_parts_and_late_is_added_up(requests: list[tuple[int, float]], number: int) -> None:
    latest = LatestSeconds()
    for gateway in range(4):
        for of, at_s in requests:
            if of == gateway:
                latest.add({int(at_s): 1}, 7.0)
    newest = max((int(at_s) for _, at_s in requests), default=0)
    seconds = [sum(int(at_s) == newest - back for _, at_s in requests) for back in range(number, 0, -1)]
    assert latest.over(number, 7.0).tolist() == seconds


def test_only_the_latest_are_kept() -> None:
    latest = LatestSeconds()
    for second in range(10_000):
        latest.add({second: 2}, float(second))
    assert latest.over(50, 9_999.0).tolist() == [2.0] * 50
    assert len(latest._counts) < 100
    latest.add({20_000: 1, 20_001: 1}, 20_001.0)
    assert np.array_equal(latest.over(2, 20_001.0), [0.0, 1.0])


@given(st.integers(1, 20), st.floats(0, 100))
def test_seconds_go_by_in_which_nobody_tells_of_any(number: int, silent_s: float) -> None:
    latest = LatestSeconds()
    for second in range(100, 160):
        latest.add({second: 2}, second - 100.0)
    over = latest.over(number, 59.0 + silent_s)
    assert (over[1:] <= over[:-1]).all()
    assert np.count_nonzero(over) >= number - silent_s
    if silent_s >= number + 3:
        assert not over.any()
