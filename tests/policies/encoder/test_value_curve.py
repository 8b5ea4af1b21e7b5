"""The predicted attainment of text classifiers against the simulator, which dispatches as the live system does."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.policies.encoder.runtime_allocation import allocate, runtime_class
from pliant.policies.encoder.value_curve import value_curve
from pliant.simulation.arrivals import Recorded
from pliant.simulation.encoder.fleet import static_fleet
from pliant.simulation.encoder.simulator import Service, Simulation

SERVICE_S = {64: 0.010, 128: 0.018, 512: 0.070}
SLO_S = 0.2


def simulated(rates: dict[int, float], replicas: int, seconds: int = 120) -> float:
    """Texts per second in time."""
    rng = np.random.default_rng(replicas)
    total = sum(rates.values())
    count = rng.poisson(total * seconds)
    arrivals = np.sort(rng.random(count)) * seconds
    tokens = rng.choice(list(rates), count, p=[rate / total for rate in rates.values()])
    classes = [runtime_class(length, each, SLO_S) for length, each in SERVICE_S.items()]
    counts = allocate(classes, [rates[length] * SLO_S for length in SERVICE_S], replicas).counts
    held = [length for length, each in zip(SERVICE_S, counts, strict=True) for _ in range(each)]
    fleet = static_fleet(SLO_S, held, SERVICE_S)
    outcome = Simulation(fleet, Service(SLO_S, admission=True)).run(Recorded(arrivals, tokens))
    return outcome.within_slo / seconds


@pytest.mark.parametrize("replicas", [2, 4, 6, 8, 12])
def test_predicts_what_is_simulated(replicas: int) -> None:
    rates = {64: 150.0, 128: 60.0, 512: 25.0}
    predicted = value_curve(SERVICE_S, rates, SLO_S, 12)[replicas]
    assert predicted / 235 == pytest.approx(simulated(rates, replicas) / 235, abs=0.08)


def test_rises_to_the_demand() -> None:
    curve = value_curve(SERVICE_S, {64: 300.0, 128: 10.0}, SLO_S, 60, spread=0.2)
    assert curve[0] == 0
    assert (np.diff(curve) >= 0).all()
    assert curve[-1] == pytest.approx(310, rel=1e-3)
    assert not value_curve(SERVICE_S, {}, SLO_S, 5).any()
