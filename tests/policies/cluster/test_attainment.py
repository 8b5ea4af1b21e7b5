"""The share in time against a simulated pool that refuses whom it cannot serve in time."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.attainment import in_time, mixed


def simulated(rate: float, servers: int, service_s: float, patience_s: float, equal: bool) -> float:
    rng = np.random.default_rng(0)
    count = 60_000
    arrivals = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    services = [service_s] * count if equal else rng.exponential(service_s, count).tolist()
    free = [0.0] * servers
    taken = 0
    for arrival, service in zip(arrivals, services, strict=True):
        start = max(arrival, free[0])
        if start - arrival <= patience_s:
            heapq.heapreplace(free, start + service)
            taken += 1
    return taken / count


@pytest.mark.parametrize("load", [0.5, 0.9, 1.0, 1.3])
@pytest.mark.parametrize("servers", [1, 4, 20])
@pytest.mark.parametrize("patience", [0.0, 0.5, 3.0])
def test_exact_for_exponential_and_close_for_equal_services(load: float, servers: int, patience: float) -> None:
    rate = load * servers / 0.1
    exponential = in_time(rate, servers, 0.1, 0.1 * patience, 1.0)
    assert exponential == pytest.approx(simulated(rate, servers, 0.1, 0.1 * patience, False), abs=0.015)
    assert in_time(rate, servers, 0.1, 0.1 * patience) == pytest.approx(
        simulated(rate, servers, 0.1, 0.1 * patience, True), abs=0.06
    )


@given(st.floats(0.01, 500), st.integers(1, 60), st.floats(0.001, 2), st.floats(0, 5), st.floats(0.1, 5))
def test_more_servers_and_patience_never_hurt(
    rate: float, servers: int, service_s: float, patience_s: float, variation: float
) -> None:
    share = in_time(rate, servers, service_s, patience_s, variation)
    assert 0 <= share <= 1
    assert share * rate * service_s <= servers * (1 + 1e-9)
    assert in_time(rate, servers + 1, service_s, patience_s, variation) >= share - 1e-9
    assert in_time(rate, servers, service_s, patience_s + 0.5, variation) >= share - 1e-9


def test_mixed_keeps_mean_and_spread() -> None:
    rates = mixed(20.0, 0.5)
    assert rates.mean() == pytest.approx(20.0)
    assert 0.3 < rates.std() / 20 < 0.55
    assert in_time(0.0, 0, 1.0, 1.0) == 1
    assert in_time(1.0, 0, 1.0, 1.0) == 0
    assert math.isclose(mixed(5.0, 0.0).std(), 0.0, abs_tol=1e-12)
