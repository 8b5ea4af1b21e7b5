"""Who comes next: regular adapters in time, random ones with their probability (Chameleon §4.1, Prefetching)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.policies.llm.arrival_histogram import ArrivalHistogram


def observed(*arrivals: tuple[float, str]) -> ArrivalHistogram[str]:
    histogram: ArrivalHistogram[str] = ArrivalHistogram()
    for now, adapter in sorted(arrivals):
        histogram.observe(adapter, now)
    return histogram


def every(seconds: float, adapter: str, until: float = 3600.0) -> list[tuple[float, str]]:
    return [(float(now), adapter) for now in np.arange(0.0, until, seconds)]


def test_a_regular_adapter_is_expected_when_it_is_due() -> None:
    def expected(age: float, horizon_s: float = 10.0) -> float:
        histogram = observed(*every(60, "minute", until=3540.0 + age), *every(2, "always", until=3540.0 + age))
        return dict(histogram.likely(3540.0 + age, horizon_s, least=0.0))["minute"]

    assert expected(1) < 0.15
    assert expected(20) < 0.05
    assert expected(40) < 0.3
    assert expected(52) > 0.6
    assert expected(56) > 0.8
    assert expected(40, horizon_s=30.0) > 0.9


def test_the_best_come_first() -> None:
    histogram = observed(
        *every(5, "five", until=3588.0), *every(20, "twenty", until=3588.0), *every(100, "hundred", 3588.0)
    )
    found = histogram.likely(3588.0, horizon_s=10.0, least=0.0)
    assert [adapter for adapter, _ in found] == ["five", "hundred", "twenty"]
    assert [probability for _, probability in found] == sorted((share for _, share in found), reverse=True)
    assert [adapter for adapter, _ in histogram.likely(3588.0, horizon_s=10.0)] == ["five", "hundred"]


@pytest.mark.parametrize("horizon_s", [3.0, 15.0])
def test_probabilities_are_those_of_random_arrivals(horizon_s: float) -> None:
    """Of Poisson arrivals at 20 rates: what is called p probable happens in a share p of the cases."""
    random = np.random.default_rng(0)
    rates = 0.01 * 1.35 ** np.arange(20)
    arrivals = [
        (float(now), adapter)
        for adapter, rate in enumerate(rates)
        for now in np.cumsum(random.exponential(1 / rate, 3000))
    ]
    arrivals = sorted((now, adapter) for now, adapter in arrivals if now < 1500)
    times = defaultdict(list)
    for now, adapter in arrivals:
        times[adapter].append(now)
    histogram: ArrivalHistogram[int] = ArrivalHistogram()
    cases, next_look = [], 500.0
    for now, adapter in arrivals:
        if now >= next_look:
            for other, probability in histogram.likely(next_look, horizon_s, least=0.0):
                came = any(next_look < at <= next_look + horizon_s for at in times[other])
                cases.append((probability, came, 1 - np.exp(-rates[other] * horizon_s)))
            next_look += 10.0
        histogram.observe(adapter, now)
    said, came, true = np.array(cases, np.float64).T
    assert np.square(said - came).mean() <= np.square(true - came).mean() + 0.02
    for low in (0.0, 0.25, 0.5, 0.75):
        group = (said >= low) & (said < low + 0.25)
        assert group.sum() < 50 or abs(said[group].mean() - came[group].mean()) <= 0.1


def test_an_adapter_seen_once_is_like_the_others() -> None:
    histogram = observed(*every(10, "a"), *every(10, "b"), (3590.0, "new"))
    shares = dict(histogram.likely(3598.0, horizon_s=10.0, least=0.0))
    assert shares["new"] > 0.8
    assert observed((1.0, "a"), (2.0, "b")).likely(3.0, horizon_s=10.0, least=0.0) == [], "nobody has come twice"


def test_who_stays_away_is_expected_no_more() -> None:
    histogram = observed(*every(10, "gone", until=600.0), *every(10, "here"))
    shares = dict(histogram.likely(3600.0, horizon_s=10.0, least=0.0))
    assert shares["gone"] < 0.05
    assert shares["here"] > 0.9


def test_new_habits_replace_old_ones() -> None:
    arrivals = [
        *every(5, "a", until=1000.0),
        *((1000.0 + now, adapter) for now, adapter in every(200, "a", until=20_000)),
    ]
    histogram = observed(*arrivals)
    assert dict(histogram.likely(20_805.0, horizon_s=10.0, least=0.0))["a"] < 0.2
    assert dict(histogram.likely(20_990.0, horizon_s=30.0, least=0.0))["a"] > 0.5


def test_memory_is_bounded() -> None:
    histogram: ArrivalHistogram[int] = ArrivalHistogram(adapters=10)
    for request in range(1000):
        histogram.observe(request, float(request))
        histogram.observe(-1, request + 0.5)
    assert len(histogram) == 10
    assert histogram.likely(1000.0, horizon_s=2.0)[0][0] == -1
    assert {adapter for adapter, _ in histogram.likely(1000.0, 2.0, least=0.0)} == {-1, *range(991, 1000)}


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 6)), max_size=40),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1),
)
def test_probabilities_are_always_some(
    waits: list[tuple[float, int]], rest: float, horizon_s: float, least: float
) -> None:
    histogram: ArrivalHistogram[int] = ArrivalHistogram(adapters=5)
    now = 0.0
    for wait, adapter in waits:
        now += wait
        histogram.observe(adapter, now)
    found = histogram.likely(now + rest, horizon_s, least)
    assert all(least <= probability <= 1 for _, probability in found)
    assert len({adapter for adapter, _ in found}) == len(found) <= len(histogram) <= 5
    longer = dict(histogram.likely(now + rest, 2 * horizon_s, least))
    assert all(longer[adapter] >= probability - 1e-9 for adapter, probability in found if adapter in longer)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="adapters must be at least 1, got 0"):
        ArrivalHistogram(adapters=0)
