"""Limits per minute: what is let in at most, and that waiting helps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.rate_limit import RateLimit


@given(st.floats(1, 1000), st.lists(st.floats(0, 30), max_size=60))
def test_no_more_is_let_in_than_the_limit(per_minute: float, pauses: list[float]) -> None:
    limit = RateLimit(per_minute)
    now = let_in = 0.0
    for pause in pauses:
        now += pause
        if not limit.wait_s(1, now):
            limit.spend(1, now)
            let_in += 1
        assert let_in <= (now / 60 + 1) * per_minute + 1e-6


@given(st.floats(1, 1000), st.floats(0, 5000), st.floats(0, 1))
def test_whoever_waits_as_told_is_let_in(per_minute: float, spent: float, share: float) -> None:
    limit = RateLimit(per_minute)
    amount = share * per_minute
    limit.spend(spent, 0.0)
    wait_s = limit.wait_s(amount, 0.0)
    if wait_s > 0.01:
        assert limit.left(wait_s * 0.99 - 0.005) < amount
    assert limit.left(wait_s) >= amount - 1e-6 * per_minute


@given(st.floats(1, 100), st.floats(1, 100), st.floats(0, 300))
def test_a_limit_that_changes_gives_nothing_away(before: float, after: float, spent: float) -> None:
    limit = RateLimit(before)
    limit.spend(spent, 0.0)
    left = limit.left(0.0)
    limit.change(after, 0.0)
    assert limit.per_minute == after
    assert limit.left(0.0) == min(after, left)
    assert limit.left(1e6) == after


def test_what_is_never_left_is_said_to_be() -> None:
    assert RateLimit(10).wait_s(11, 0.0) == math.inf
    assert RateLimit(0).wait_s(1, 0.0) == math.inf
    with pytest.raises(ValueError, match="at least 0"):
        RateLimit(-1)


def test_what_was_not_needed_is_there_again_but_no_more_than_the_limit() -> None:
    limit = RateLimit(60)
    limit.spend(50, 0.0)
    limit.give_back(20, 0.0)
    assert limit.left(0.0) == 30
    limit.give_back(50, 1.0)
    assert limit.left(1.0) == 60
