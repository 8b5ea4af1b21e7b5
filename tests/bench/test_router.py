"""The parts of the router's comparison that need no cluster."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.bench.router.dispatch_cost import cost_in_method_calls
from pliant.bench.router.two_gateways import latencies, p98_against_one, service_s


def test_gateways_that_share_a_light_load_do_not_meet() -> None:
    assert p98_against_one(replicas=32, load=0.3, seconds=10.0, seed=0) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_late_reports_do_not_make_gateways_run_after_each_other(gateways: int) -> None:
    """Those that count reports in full have queues of seconds at this load."""
    found = latencies(gateways, replicas=16, load=0.75, seconds=15.0, seed=0)
    assert min(found) == pytest.approx(service_s(128))
    assert max(found) < 0.15


def test_gateways_that_share_replicas_do_no_worse_than_if_each_kept_to_its_own() -> None:
    shared, apart = (
        np.quantile(latencies(gateways, 16 * gateways, load=0.75, seconds=20.0, seed=0), 0.98) for gateways in (2, 1)
    )
    assert shared < apart


def test_a_dispatch_costs_something() -> None:
    assert 1 < cost_in_method_calls(replicas=8, load=0.6, requests=20_000, seed=0) < 1000
