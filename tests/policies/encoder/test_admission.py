"""The admission rule: fair to utility and budget, and honest about when to come back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.admission import most_outstanding, requests_within, retry_after

services = st.floats(1e-4, 10)
budgets = st.floats(-1, 60)
utilities = st.floats(0, 1)
counts = st.integers(0, 500)


@given(services, budgets, budgets, utilities, utilities)
def test_more_budget_or_utility_never_admits_less(
    service_s: float, budget_s: float, other_budget_s: float, utility: float, other_utility: float
) -> None:
    low_budget, high_budget = sorted((budget_s, other_budget_s))
    low_utility, high_utility = sorted((utility, other_utility))
    least = most_outstanding(service_s, low_budget, low_utility)
    assert least <= most_outstanding(service_s, high_budget, low_utility)
    assert least <= most_outstanding(service_s, low_budget, high_utility)


@given(services, budgets, utilities)
def test_an_idle_replica_is_open_whenever_it_is_fast_enough(service_s: float, budget_s: float, utility: float) -> None:
    assert (most_outstanding(service_s, budget_s, utility) >= 0) == (service_s <= budget_s)


@given(services, budgets)
def test_utility_zero_gets_idle_replicas_only(service_s: float, budget_s: float) -> None:
    assert most_outstanding(service_s, budget_s, 0.0) <= 0


@given(services, budgets, counts)
def test_whoever_is_admitted_is_predicted_to_finish_in_time(service_s: float, budget_s: float, count: int) -> None:
    finish_s = (count + 1) * service_s
    if count <= most_outstanding(service_s, budget_s):
        assert finish_s <= budget_s + 1e-6
    else:
        assert finish_s > budget_s - 1e-6


@given(services, budgets, utilities, counts)
def test_retry_is_the_first_time_that_succeeds(service_s: float, budget_s: float, utility: float, count: int) -> None:
    wait_s = retry_after(count, service_s, budget_s, utility)
    most = most_outstanding(service_s, budget_s, utility)
    if math.isinf(wait_s):
        assert service_s > budget_s
        return
    completed = round(wait_s / service_s)
    assert count - completed <= most
    assert completed == 0 or count - completed + 1 > most


@pytest.mark.parametrize(("seconds", "service_s", "count"), [(0.3, 0.1, 3), (0.299, 0.1, 2), (0.0, 0.1, 0), (7, 2, 3)])
def test_whole_multiples_survive_float_rounding(seconds: float, service_s: float, count: int) -> None:
    assert requests_within(seconds, service_s) == count
