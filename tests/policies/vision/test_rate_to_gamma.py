"""Which gamma carries which rate, and what a second is worth to those to come (OTAS §III-D)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pliant.policies.vision.rate_to_gamma import RateToGamma, RecentRate
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_profile import TokenProfile

PER_S = {-10: 200.0, 0: 100.0, 4: 50.0}
ACCURACY = {-10: 0.5, 0: 0.8, 4: 0.9}


def profile() -> TokenProfile:
    """A batch takes as long as its rows one by one, but four rows at least."""
    return TokenProfile(PER_S, lambda gamma, rows: max(rows, 4) / PER_S[gamma], lambda task, gamma: ACCURACY[gamma])


@dataclass(frozen=True, eq=False)
class Image:
    arrival: float
    utility: float = 1.0
    task: str = "digits"
    allowed_s: float = 1.0

    @property
    def deadline(self) -> float:
        return self.arrival + self.allowed_s


@pytest.mark.parametrize(("rate", "gamma"), [(0, 4), (40, 4), (41, 0), (80, 0), (81, -10), (160, -10), (1000, -10)])
def test_the_greatest_gamma_that_carries_the_rate(rate: float, gamma: int) -> None:
    assert RateToGamma(profile(), load=0.8)(rate) == gamma


def test_a_slower_device_carries_less() -> None:
    slow = profile()
    gamma_of = RateToGamma(slow, load=1.0)
    assert gamma_of(50) == 4
    slow.slowdown = 2.0
    assert gamma_of(50) == 0


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="load must be above 0"):
        RateToGamma(profile(), load=0.0)
    with pytest.raises(ValueError, match="window_s must be positive"):
        RecentRate(0.0)


def test_the_rate_follows_arrivals_and_fades() -> None:
    rate = RecentRate(0.5)
    assert rate.value(0.0) == 0
    for arrival in range(500):
        rate.add(arrival / 100)
    assert rate.value(5.0) == pytest.approx(100, rel=0.02)
    for arrival in range(500):
        rate.add(5 + arrival / 200)
    assert rate.value(7.5) == pytest.approx(200, rel=0.02)
    assert rate.value(8.0) == pytest.approx(200 / 2.71828, rel=0.02)


def test_the_rate_is_known_soon_after_the_start() -> None:
    rate = RecentRate(0.5)
    for arrival in range(20):
        rate.add(10 + arrival / 100)
    assert rate.value(10.2) == pytest.approx(100, rel=0.1)


def price_at(rate: int, waiting: int = 0) -> float:
    price = TimePrice(profile(), window_s=0.5)
    for arrival in range(4 * rate):
        price.arrived(Image(arrival / rate))
    return price(4.0, waiting)


STEEP, FLAT = (0.8 - 0.5) / (1 / 100 - 1 / 200), (0.9 - 0.8) / (1 / 50 - 1 / 100)
"""Of the hull over (0, 0), (1/200, 0.5), (1/100, 0.8) and (1/50, 0.9), behind its first edge."""
FIRST = 0.5 * 200


@pytest.mark.parametrize(
    ("rate", "waiting", "price"),
    [(80, 0, 0.0), (120, 0, FLAT), (80, 20, FLAT), (240, 0, STEEP), (80, 80, STEEP), (500, 0, FIRST), (80, 200, FIRST)],
)
def test_a_second_costs_what_it_is_worth_to_those_who_wait_and_come(rate: int, waiting: int, price: float) -> None:
    assert price_at(rate, waiting) == pytest.approx(price / 2)


def test_the_price_is_in_the_utilities_of_those_who_come() -> None:
    price = TimePrice(profile())
    assert price(0.0, 0) == 0
    for arrival in range(480):
        price.arrived(Image(arrival / 120, utility=2 + arrival % 2 * 4))
    assert price(4.0, 0) == pytest.approx(FLAT)
    assert price(4.0, 30) == pytest.approx(3 * FLAT)


def test_a_few_that_have_all_the_time_in_the_world_do_not_change_the_price() -> None:
    price = TimePrice(profile())
    for arrival in range(480):
        price.arrived(Image(arrival / 120, allowed_s=600.0 if arrival % 30 == 0 else 1.0))
    assert price(4.0, 0) == pytest.approx(FLAT / 2)


@pytest.mark.parametrize("better", [-10, 0])
def test_of_gammas_that_take_equally_long_the_better_one_counts(better: int) -> None:
    accuracy = {-10: 0.5, 0: 0.5, 4: 0.9} | {better: 0.8}
    price = TimePrice(
        TokenProfile(PER_S, lambda gamma, rows: rows / (50 if gamma == 4 else 100), lambda task, gamma: accuracy[gamma])
    )
    for arrival in range(480):
        price.arrived(Image(arrival / 120))
    assert price(4.0, 0) == pytest.approx(FLAT / 2)


def test_a_gamma_that_tasks_lack_is_worth_nothing_to_them() -> None:
    tasks = {"digits": ACCURACY, "parity": {-10: 0.5, 0: 0.8}}
    some = TokenProfile(PER_S, lambda gamma, rows: rows / PER_S[gamma], lambda task, gamma: tasks[str(task)].get(gamma))
    price = TimePrice(some)
    for arrival in range(480):
        price.arrived(Image(arrival / 120, task="parity"))
    assert price(4.0, 0) == 0
    for arrival in range(480, 960):
        price.arrived(Image(arrival / 120, task="parity" if arrival % 2 else "digits"))
    assert price(8.0, 0) == 0
    assert price(8.0, 10) == pytest.approx(FLAT / 2)
