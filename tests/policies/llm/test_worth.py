"""What idle things are worth: learned rates against what was drawn, and the order that follows."""

from __future__ import annotations

import random

import pytest

from pliant.policies.llm.worth import Reuse, Use, scorer


def test_by_the_second_that_a_byte_saves() -> None:
    score = scorer("joint", [], 0.0)
    assert score(Use(1, 0.0, cost=3.0, bytes=2, rate=0.5)) == pytest.approx(0.75)


def test_before_anything_is_known_the_rate_falls_with_age() -> None:
    rates = [Reuse().rate(1.0, age) for age in (0, 1, 5, 20, 100, 1000, 10_000)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("frequency", [1.0, 4.0])
def test_rates_are_learned_for_each_frequency_and_age(frequency: float) -> None:
    """Half of all are used again, after 20 seconds on average; the others are evicted after 500."""
    reuse, rng = Reuse(), random.Random(0)
    for _ in range(20_000):
        age = rng.expovariate(1 / 20)
        again = rng.random() < 0.5 and age < 500
        reuse.observe(frequency, age if again else 500.0, again)
    for age in (5.0, 20.0, 40.0):
        left = 0.5 * 2.718281828 ** (-age / 20)
        assert reuse.rate(frequency, age) == pytest.approx(left / 20 / (left + 0.5), rel=0.3)
    assert reuse.rate(frequency, 400.0) < 1e-4
    assert reuse.rate(20.0, 400.0) > 1e-4, "nothing is known of those"
