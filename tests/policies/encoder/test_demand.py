"""Demand: counted exactly, and a shift is told from chance and from bursts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pliant.policies.encoder.demand import LengthDemand, Shift

LONGEST = 40
LENGTHS = (8, 9, 24, 40)

waits = st.sampled_from((0.0, 0.1, 0.5, 1.0, 1.7, 5.0, 30.0))
reports = st.dictionaries(st.integers(0, 60), st.integers(0, 5), max_size=6)
scripts = st.lists(st.tuples(waits, reports), min_size=1, max_size=40)
bins = st.sets(st.integers(1, LONGEST), min_size=1, max_size=6).map(sorted)


def bin_of(length: int, lengths: Sequence[int]) -> int:
    return next((index for index, longest in enumerate(lengths) if length <= longest), len(lengths) - 1)


@given(scripts, waits, bins, st.sampled_from((0.5, 1.0, 2.0)), st.floats(0, 1))
def test_equals_a_count_of_all_reports(
    script: list[tuple[float, dict[int, int]]], rest: float, lengths: list[int], tick_s: float, quantile: float
) -> None:
    window_s = 20.0
    demand = LengthDemand(LONGEST, window_s, tick_s)
    now = 3.0
    ticks: dict[int, Counter[int]] = {}
    for wait_s, counts in script:
        now += wait_s
        demand.add(now, counts)
        tick = ticks.setdefault(math.ceil(now / tick_s - 1e-9) - 1, Counter())
        tick.update(counts)
    now += rest
    stop = math.floor(now / tick_s + 1e-9)
    window = range(max(min(ticks), stop - round(window_s / tick_s)), stop) or [max(ticks)]
    rows = [ticks.get(tick, Counter()) for tick in window]

    histogram = np.zeros(LONGEST + 1, np.int64)
    binned = np.zeros((len(rows), len(lengths)))
    for row, tick_counts in zip(binned, rows, strict=True):
        for length, count in tick_counts.items():
            histogram[min(length, LONGEST)] += count
            row[bin_of(length, lengths)] += count
    assert demand.histogram(now).tolist() == histogram.tolist()
    assert demand.rates(now, lengths) == pytest.approx(binned.mean(axis=0) / tick_s)
    assert demand.rates(now, lengths, quantile) == pytest.approx(np.quantile(binned, quantile, axis=0) / tick_s)


@given(scripts)
def test_arrays_count_like_mappings(script: list[tuple[float, dict[int, int]]]) -> None:
    mapped, listed = LengthDemand(LONGEST), LengthDemand(LONGEST)
    now = 0.0
    for wait_s, counts in script:
        now += wait_s
        mapped.add(now, counts)
        listed.add(now, np.array([counts.get(length, 0) for length in range(61)]))
    assert mapped.histogram(now).tolist() == listed.histogram(now).tolist()


def test_several_gateways_merge_and_a_late_report_still_counts() -> None:
    demand = LengthDemand(LONGEST)
    demand.add(10.5, {5: 30})
    demand.add(10.6, {5: 10, 30: 40})
    demand.add(11.9, {30: 20})
    demand.add(10.9, {30: 20})
    assert demand.rates(11.0, (8, 40)) == (40.0, 40.0)
    assert demand.rates(12.0, (8, 40)) == (20.0, 40.0)


def test_a_fresh_window_is_divided_by_what_was_observed() -> None:
    demand = LengthDemand(LONGEST)
    assert demand.rates(0.0, LENGTHS) == (0.0,) * 4
    assert not demand.histogram(0.0).any()
    for second in (101, 102, 103):
        demand.add(float(second), {5: 100})
    assert demand.rates(103.0, LENGTHS) == (100.0, 0.0, 0.0, 0.0)
    assert demand.rates(106.0, LENGTHS) == (50.0, 0.0, 0.0, 0.0), "silence counts"


def test_a_quantile_sees_the_burst_that_the_mean_hides() -> None:
    demand = LengthDemand(LONGEST)
    for second in range(100):
        demand.add(second + 1.0, {5: 500 if second % 10 == 0 else 20})
    assert demand.rates(100.0, (40,)) == (68.0,)
    assert demand.rates(100.0, (40,), 0.95) == (500.0,)


def test_forgotten_ticks_do_not_count() -> None:
    demand = LengthDemand(LONGEST)
    demand.forget(5.0)
    for second in range(60):
        demand.add(second + 1.0, {5: 10 if second < 50 else 90})
    demand.forget(50.0)
    assert demand.rates(60.0, (40,)) == (90.0,)
    demand.forget(20.0)
    assert demand.rates(60.0, (40,)) == (90.0,), "what was forgotten does not come back"
    demand.forget(1000.0)
    assert demand.rates(60.0, (40,)) == (90.0,), "at least the newest tick stays"


SHARES = np.array([0.5, 0.2, 0.1, 0.08, 0.05, 0.04, 0.02, 0.01])
BINS = (5, 10, 15, 20, 25, 30, 35, 40)


def steady(rate: float) -> Callable[[np.random.Generator], NDArray[np.float64]]:
    return lambda random: np.full(120, rate)


def bursty(rate: float, ratio: float, dwell_s: float) -> Callable[[np.random.Generator], NDArray[np.float64]]:
    """A Markov-modulated process: two states whose rates differ by `ratio`, left after `dwell_s` on average."""

    def rates(random: np.random.Generator) -> NDArray[np.float64]:
        flips = random.random((120, 10)) < 0.1 / dwell_s
        high = (flips.cumsum().reshape(120, 10) + random.integers(2)) % 2
        per_tick: NDArray[np.float64] = (2 * rate / (1 + ratio) * np.where(high, ratio, 1.0)).mean(axis=1)
        return per_tick

    return rates


def first_shift(
    seed: int,
    rates: Callable[[np.random.Generator], NDArray[np.float64]],
    shares: NDArray[np.float64] = SHARES,
    factor: float = 1.0,
    before: int = 120,
) -> tuple[int, Shift] | None:
    """Seconds until demand is found to have shifted, after a plan, to other shares and a rate times `factor`."""
    random = np.random.default_rng(seed)
    demand = LengthDemand(LONGEST)

    def arrive(second: int, rate: float, mix: NDArray[np.float64]) -> None:
        counts = random.multinomial(random.poisson(rate), mix)
        demand.add(float(second), dict(zip(BINS, counts.tolist(), strict=True)))

    for second, rate in enumerate(rates(random)[:before], start=1):
        arrive(second, rate, SHARES)
    snapshot = demand.snapshot(float(before), BINS)
    for second, rate in enumerate(rates(random), start=1):
        arrive(before + second, factor * rate, shares)
        shift = demand.shifted(float(before + second), snapshot)
        if shift:
            return second, shift
    return None


@pytest.mark.parametrize(
    "rates",
    [steady(0.5), steady(5), steady(100), steady(5000), *(bursty(200, 4, dwell_s) for dwell_s in (0.2, 1, 3, 10))],
    ids=["0.5/s", "5/s", "100/s", "5000/s", "bursts 0.2 s", "bursts 1 s", "bursts 3 s", "bursts 10 s"],
)
def test_chance_and_bursts_are_no_shift(rates: Callable[[np.random.Generator], NDArray[np.float64]]) -> None:
    """Twenty plans of two minutes each."""
    assert sum(first_shift(seed, rates) is not None for seed in range(20)) == 0


@pytest.mark.parametrize("before", [3, 10, 40])
def test_chance_is_no_shift_from_a_short_snapshot_either(before: int) -> None:
    assert sum(first_shift(seed, steady(100), before=before) is not None for seed in range(20)) == 0


def moved(*by: float) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = SHARES + np.array(by)
    return shares


LENGTHS_CHANGED = r"\d+% of the requests changed to other lengths"
RATE_CHANGED = r"the rate changed from [\d.]+ to [\d.]+ requests/s"


@pytest.mark.parametrize("rates", [steady(100), bursty(100, 3, 1)], ids=["steady", "bursty"])
@pytest.mark.parametrize(
    ("shares", "factor", "reason"),
    [
        (moved(-0.2, 0, 0, 0, 0, 0, 0, 0.2), 1, LENGTHS_CHANGED),
        (moved(-0.2, 0.2, 0, 0, 0, 0, 0, 0), 1, LENGTHS_CHANGED),
        (SHARES, 4, RATE_CHANGED),
    ],
    ids=["longer", "other", "more"],
)
def test_a_shift_is_seen_within_ten_seconds(
    rates: Callable[[np.random.Generator], NDArray[np.float64]],
    shares: NDArray[np.float64],
    factor: float,
    reason: str,
) -> None:
    found = [first_shift(seed, rates, shares, factor) for seed in range(20)]
    seconds = sorted(seen[0] if seen else math.inf for seen in found)
    assert seconds[0] >= 5
    assert seconds[17] <= 10, "nine times of ten"
    reasons = [seen[1].reason for seen in found if seen]
    assert sum(re.fullmatch(reason, given) is not None for given in reasons) >= 18


@pytest.mark.parametrize(("factor", "seconds"), [(0, 10), (0.5, 10), (1.5, 20)])
def test_a_steady_rate_that_changes_is_seen(factor: float, seconds: int) -> None:
    found = [first_shift(seed, steady(100), factor=factor) for seed in range(20)]
    assert all(seen and seen[0] <= seconds and re.fullmatch(RATE_CHANGED, seen[1].reason) for seen in found)


def test_small_changes_are_no_shift() -> None:
    small = moved(-0.06, 0.03, 0, 0, 0, 0, 0, 0.03)
    assert sum(first_shift(seed, steady(5000), small, 1.15) is not None for seed in range(10)) == 0


def test_little_evidence_is_no_shift() -> None:
    demand = LengthDemand(LONGEST)
    demand.add(120.0, {5: 4})
    snapshot = demand.snapshot(120.0, LENGTHS)
    for second in range(121, 180):
        demand.add(float(second), {40: 1} if second % 2 else {})
        assert demand.shifted(float(second), snapshot) is None


def test_the_first_real_load_overtakes_a_plan_made_for_none() -> None:
    demand = LengthDemand(LONGEST)
    for second in range(5):
        demand.add(second + 1.0, {5: 1} if second == 0 else {})
    snapshot = demand.snapshot(5.0, LENGTHS)
    for second in range(5, 10):
        assert demand.shifted(float(second), snapshot) is None
        demand.add(second + 1.0, {5: 100})
    shift = demand.shifted(10.0, snapshot)
    assert shift == Shift(5.0, "the rate changed from 0.2 to 100.0 requests/s")


def test_a_shift_that_has_just_begun_does_not_hide_in_the_snapshot() -> None:
    demand = LengthDemand(LONGEST)
    for second in range(1, 34):
        demand.add(float(second), {5 if second <= 30 else 40: 100})
    assert demand.observed_s(33.0) == 33
    snapshot = demand.snapshot(33.0, LENGTHS, newest_s=10.0)
    assert snapshot.counts.sum() == 2300
    for second in range(34, 36):
        assert demand.shifted(float(second - 1), snapshot) is None
        demand.add(float(second), {40: 100})
    shift = demand.shifted(35.0, snapshot)
    assert shift
    assert shift.since == 30.0


def test_planning_anew_uses_the_new_demand_only() -> None:
    """And once that is the plan's demand, nothing has shifted any more."""
    demand = LengthDemand(LONGEST)
    random = np.random.default_rng(0)
    for second in range(1, 241):
        demand.add(float(second), {5: int(random.poisson(200 if second <= 130 else 20)), 40: int(random.poisson(50))})
        if second == 120:
            snapshot = demand.snapshot(120.0, LENGTHS)
        elif second > 120 and (shift := demand.shifted(float(second), snapshot)):
            assert 130 < second <= 140
            assert shift.since == pytest.approx(130, abs=5)
            demand.forget(shift.since)
            assert demand.rates(float(second), (8, 40)) == pytest.approx((20, 50), rel=0.4)
            snapshot = demand.snapshot(float(second), LENGTHS)
    assert demand.rates(240.0, (8, 40)) == pytest.approx((20, 50), rel=0.2)


@pytest.mark.parametrize("arguments", [(0, 120.0, 1.0), (5, 0.5, 1.0), (5, 120.0, 0.0)])
def test_bad_settings(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="longest must be positive"):
        LengthDemand(*arguments)


@pytest.mark.parametrize("counts", [{-1: 3}, {3: -1}])
def test_bad_reports(counts: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        LengthDemand(LONGEST).add(0.0, counts)


@pytest.mark.parametrize("lengths", [(), (0, 4), (8, 8), (9, 8), (8, 41)])
def test_bad_lengths(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="lengths must rise"):
        LengthDemand(LONGEST).rates(0.0, lengths)
