"""The admission rule: fair to slack and budget, and honest about when to come back."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.admission import retry_after

services = st.floats(1e-4, 10)
waits = st.floats(0, 60)
budgets = st.floats(-1, 60)
utilities = st.floats(0, 1)


@given(waits, services, budgets, budgets, utilities, utilities)
def test_more_budget_or_utility_never_waits_longer(
    wait_s: float, service_s: float, budget_s: float, other_budget_s: float, slack_share: float, other_share: float
) -> None:
    low_budget, high_budget = sorted((budget_s, other_budget_s))
    low_share, high_share = sorted((slack_share, other_share))
    longest_s = retry_after(wait_s, service_s, service_s, low_budget, low_share)
    assert longest_s >= retry_after(wait_s, service_s, service_s, high_budget, low_share)
    assert longest_s >= retry_after(wait_s, service_s, service_s, low_budget, high_share)


@given(services, budgets, utilities)
def test_an_idle_replica_is_open_whenever_it_is_fast_enough(
    service_s: float, budget_s: float, slack_share: float
) -> None:
    assert (retry_after(0.0, service_s, service_s, budget_s, slack_share) == 0) == (service_s <= budget_s + 1e-9)


@given(st.floats(1e-6, 60), services, budgets)
def test_utility_zero_gets_idle_replicas_only(wait_s: float, service_s: float, budget_s: float) -> None:
    assert retry_after(wait_s, service_s, service_s, budget_s, 0.0) > 0


@given(waits, services, budgets)
def test_whoever_is_admitted_is_predicted_to_finish_in_time(wait_s: float, service_s: float, budget_s: float) -> None:
    admitted = retry_after(wait_s, service_s, service_s, budget_s) == 0
    assert admitted == (wait_s + service_s <= budget_s) or abs(wait_s + service_s - budget_s) < 1e-8


@given(waits, services, services, budgets, utilities)
def test_retry_is_the_first_time_that_succeeds(
    wait_s: float, service_s: float, idle_s: float, budget_s: float, slack_share: float
) -> None:
    after_s = retry_after(wait_s, service_s, idle_s, budget_s, slack_share)
    if math.isinf(after_s):
        assert min(service_s, idle_s) > budget_s
        return
    assert retry_after(max(0.0, wait_s - after_s), service_s, idle_s, budget_s, slack_share) == 0
    if after_s > 1e-6:
        assert retry_after(wait_s - after_s + 1e-6, service_s, idle_s, budget_s, slack_share) > 0


@given(waits, services, services, utilities)
def test_an_estimate_above_the_budget_keeps_nothing_from_an_idle_replica_that_was_measured_below(
    wait_s: float, service_s: float, idle_s: float, slack_share: float
) -> None:
    budget_s = (service_s + idle_s) / 2
    if service_s > budget_s + 1e-6:
        assert retry_after(wait_s, service_s, idle_s, budget_s, slack_share) == (wait_s if wait_s > 1e-9 else 0)
    elif service_s < budget_s - 1e-6:
        assert retry_after(0.0, service_s, idle_s, budget_s, slack_share) == 0
