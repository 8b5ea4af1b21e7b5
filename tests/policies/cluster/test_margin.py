"""The margin: a quantile of what waits took more than predicted, and enough of it to be in time in an overload."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.margin import Margin

SLO_S, SERVICE_S = 0.5, 0.03
errors = st.lists(st.floats(0.01, 10), max_size=1200)


@given(errors)
def test_it_is_the_quantile_of_the_last_ones_within_bounds(seconds: list[float]) -> None:
    margin = Margin()
    for each in seconds:
        margin.observe(1.0, each, 1.5)
    recent = sorted(each - 1 for each in seconds[-512:])
    expected = recent[int(len(recent) * 0.99)] if recent else 0.0
    least = 0.5 if len(recent) < 200 else 0.0
    assert margin.value == pytest.approx(min(1.0, max(least, expected)))


def taught(predicted_s: float, seconds: float, budget_s: float) -> Margin:
    """By as many requests as it takes, which are alike."""
    margin = Margin()
    for _ in range(200):
        margin.observe(predicted_s, seconds, budget_s)
    return margin


@given(st.floats(1e-3, 100), st.floats(0.5, 2))
def test_it_is_a_share(scale: float, ratio: float) -> None:
    margin = taught(scale, scale * ratio, scale)
    assert margin.value == pytest.approx(max(0.0, ratio - 1))


def test_a_millisecond_on_top_of_a_short_wait_is_none_of_a_long_one() -> None:
    assert taught(0.001, 0.003, 0.5).value == pytest.approx(0.008)


def test_what_had_no_time_says_nothing() -> None:
    with pytest.raises(ValueError, match="above 0 seconds, got 0"):
        Margin().observe(1.0, 1.0, 0.0)


def overloaded(margin: Margin | None, seed: int, seconds: float = 120) -> tuple[float, float]:
    """A queue at twice its capacity; what a text takes varies. In time a second; P98 over the SLO."""
    rng = random.Random(seed)
    now = free = 0.0
    waiting: list[tuple[float, float, float]] = []
    latencies = []
    while (now := now + rng.expovariate(2 / SERVICE_S)) < seconds:
        while waiting and waiting[0][0] <= now:
            done, arrived, predicted_s = waiting.pop(0)
            if margin:
                margin.observe(predicted_s, done - arrived, SLO_S)
        wait_s = len(waiting) * SERVICE_S
        if wait_s * (1 + (margin.value if margin else 0.0)) + SERVICE_S > SLO_S:
            continue
        free = max(now, free) + SERVICE_S * rng.lognormvariate(-0.125, 0.5)
        waiting.append((free, now, wait_s + SERVICE_S))
        latencies.append(free - now)
    return sum(each <= SLO_S for each in latencies) / seconds, float(np.quantile(latencies, 0.98)) / SLO_S


@pytest.mark.parametrize("seed", range(3))
def test_with_it_what_is_accepted_is_in_time_and_no_less_is_done(seed: int) -> None:
    in_time_per_s, p98 = overloaded(None, seed)
    assert p98 > 1
    with_margin_per_s, with_margin_p98 = overloaded(Margin(), seed)
    assert with_margin_p98 <= 1
    assert with_margin_per_s > max(in_time_per_s, 0.95 / SERVICE_S)


@pytest.mark.parametrize("seed", range(3))
def test_from_the_start_what_is_accepted_is_in_time(seed: int) -> None:
    in_time_per_s, p98 = overloaded(Margin(), seed, 10)
    assert p98 <= 1
    assert in_time_per_s > 0.95 / SERVICE_S
