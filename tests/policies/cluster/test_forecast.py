"""Forecasts of made-up rates whose best forecast is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.cluster.forecast import DAY_S, Forecast, excess

BIN_S = 600.0
BINS = int(DAY_S / BIN_S)


def errors(rates: np.ndarray, ahead: int, skip: int) -> tuple[float, float]:
    """Mean absolute error of the forecast, and of "as now"."""
    forecast = Forecast(BIN_S, ahead)
    made = []
    for rate in rates:
        forecast.observe(float(rate))
        made.append(forecast.rate)
    later = rates[ahead:][skip:]
    return (
        float(np.abs(np.array(made)[:-ahead][skip:] - later).mean()),
        float(np.abs(rates[:-ahead][skip:] - later).mean()),
    )


def test_what_is_constant_stays() -> None:
    forecast = Forecast(BIN_S, 3)
    assert forecast.rate == 0
    for _ in range(50):
        forecast.observe(7.0)
    assert forecast.rate == pytest.approx(7.0)
    assert forecast.quantile(0.9) == pytest.approx(7.0)


def test_a_day_that_repeats_is_known_ahead() -> None:
    day = 50 + 40 * np.sin(2 * np.pi * np.arange(BINS) / BINS) + 30 * (np.arange(BINS) > BINS / 2)
    rates = np.tile(day, 8) * np.random.default_rng(1).normal(1, 0.01, 8 * BINS)
    ours, naive = errors(rates, 6, 3 * BINS)
    assert ours < 0.5 * naive


def test_noise_is_smoothed_and_a_ramp_continued() -> None:
    rng = np.random.default_rng(2)
    ours, naive = errors(rng.normal(100, 10, 600), 2, 200)
    assert ours < 0.85 * naive
    ours, naive = errors(10 + 5.0 * np.arange(300), 4, 100)
    assert ours < 0.3 * naive


@pytest.mark.parametrize(("before", "after"), [(6, 2), (2, 6), (3, 3), (5, 1)])
def test_another_horizon_is_learned(before: int, after: int) -> None:
    forecast = Forecast(BIN_S, before)
    for rate in range(200):
        forecast.observe(5.0 * rate)
    assert forecast.rate - 5 * 199 == pytest.approx(5 * before, rel=0.3)
    forecast.look(after)
    for rate in range(200, 500):
        forecast.observe(5.0 * rate)
    assert forecast.rate - 5 * 499 == pytest.approx(5 * after, rel=0.3)
    with pytest.raises(ValueError, match="ahead"):
        forecast.look(0)


def test_quantiles_hold_as_often_as_they_say() -> None:
    rates = np.random.default_rng(3).lognormal(3, 0.3, 2000)
    forecast = Forecast(BIN_S, 2)
    high = []
    for rate in rates:
        forecast.observe(float(rate))
        high.append(forecast.quantile(0.9))
    assert (rates[2:] <= np.array(high[:-2]))[100:].mean() == pytest.approx(0.9, abs=0.03)
    assert forecast.spread == pytest.approx(0.3, abs=0.06)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_rates_are_never_negative_or_infinite(rates: list[float], ahead: int) -> None:
    forecast = Forecast(BIN_S, ahead)
    for rate in rates:
        forecast.observe(rate)
        assert 0 <= forecast.rate < np.inf
        assert 0 <= forecast.quantile(0.5) < np.inf


def test_bursts_within_bins_are_part_of_the_spread_and_chance_is_not() -> None:
    rng = np.random.default_rng(0)
    calm, bursty = Forecast(10.0, 3), Forecast(10.0, 3)
    few = Forecast(10.0, 3)
    for _ in range(500):
        counts = rng.poisson(100, 10).astype(float)
        calm.observe(float(counts.mean()), excess(counts))
        counts = rng.poisson(1, 10).astype(float)
        few.observe(1.0, excess(counts))
        rates = 100 * rng.lognormal(-0.02, 0.2, 10)
        counts = rng.poisson(rates).astype(float)
        bursty.observe(float(counts.mean()), excess(counts))
    assert calm.spread < 0.08
    assert few.spread < 0.3, "a request a second varies by itself within a bin, and by chance alone"
    assert 0.17 < bursty.spread < 0.27
    assert excess(np.zeros(10)) == excess(np.ones(1)) == 0.0


@pytest.mark.parametrize("rate", [0.2, 3.0, 50.0, 1000.0])
def test_a_surge_is_told_from_chance(rate: float) -> None:
    rng = np.random.default_rng(0)
    forecast = Forecast(10.0, 2)
    assert forecast.surged(np.array([10.0, 10.0]))
    false = 0
    for _ in range(1000):
        counts = rng.poisson(rate, 10).astype(float)
        false += forecast.planned > 0 and forecast.surged(counts[-2:])
        forecast.observe(float(counts.mean()), excess(counts))
    assert false <= 2
    assert forecast.surged(rng.poisson(2.5 * rate + 10, 2).astype(float))
    assert not forecast.surged(np.zeros(2))


def test_what_is_planned_follows_a_surge_at_once_and_a_lull_after_a_minute() -> None:
    forecast = Forecast(10.0, 3)
    for _ in range(20):
        for rate in (10.0,) * 20 + (40.0,):
            forecast.observe(rate)
        for _ in range(7):
            forecast.observe(10.0)
    assert forecast.planned < 12
    forecast.observe(40.0)
    assert forecast.rate < 40, "spikes have always gone again"
    assert forecast.planned == 40
    for _ in range(3):
        forecast.observe(10.0)
    assert forecast.planned >= 15 - 1e-9
    for _ in range(6):
        forecast.observe(10.0)
    assert forecast.planned < 12


def test_after_days_of_short_bins_it_is_as_sane_as_on_the_first() -> None:
    """What a feature has not said for a day must not blow up the others: the planner looks every ten seconds."""
    rng = np.random.default_rng(0)
    forecast, days = Forecast(10.0, 4), 3
    times = np.arange(days * DAY_S / 10) * 10
    rates = 100 * (1 + 0.5 * np.sin(2 * np.pi * times / DAY_S)) * rng.lognormal(0, 0.05, len(times))
    for rate in rates.tolist():
        forecast.observe(rate)
        assert forecast.rate < 2 * rates.max()


@given(st.lists(st.floats(0, 1e6), max_size=30), st.floats(0, 1e6), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_whatever_comes_after_a_steady_rate_there_is_a_forecast(rates: list[float], steady: float, ahead: int) -> None:
    forecast = Forecast(10.0, ahead)
    for rate in [steady] * 20 + rates:
        forecast.observe(rate)
        assert np.isfinite(forecast.rate)
        assert forecast.rate >= 0
