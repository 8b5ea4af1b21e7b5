"""How long a batch may take while others may come."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.vision.longest_batch import SHARE, LongestBatch


def test_it_is_a_share_of_what_others_allow() -> None:
    longest = LongestBatch()
    assert longest.seconds("a", 0.0) == math.inf
    longest.came("a", 3600.0, 0.0)
    longest.came("b", 0.6, 1.0)
    longest.came("b", 2.0, 2.0)
    longest.came("c", 1.0, 3.0)
    assert longest.seconds("a", 4.0) == SHARE * 0.6
    assert longest.seconds("b", 4.0) == SHARE * 1.0
    assert longest.seconds("c", 4.0) == SHARE * 0.6


def test_those_who_have_not_come_for_long_do_not_count() -> None:
    longest = LongestBatch()
    longest.came("b", 0.6, 0.0)
    assert longest.seconds("a", 59.0) == SHARE * 0.6
    assert longest.seconds("a", 61.0) == math.inf
    longest.came("b", 2.0, 100.0)
    assert longest.seconds("a", 101.0) == SHARE * 2.0, "what it allowed long ago is forgotten"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 10), st.floats(0, 50)), max_size=60), st.floats(0, 100)
)
def test_only_what_others_allowed_in_the_last_minute_counts(
    images: list[tuple[str, float, float]], after_s: float
) -> None:
    longest, now, came = LongestBatch(), 0.0, []
    for tenant, allowed_s, pause_s in images:
        now += pause_s
        longest.came(tenant, allowed_s, now)
        came.append((tenant, allowed_s, now))
    now += after_s
    others = [allowed_s for tenant, allowed_s, at in came if tenant != "a" and now - at <= 60]
    assert longest.seconds("a", now) == SHARE * min(others, default=math.inf)
