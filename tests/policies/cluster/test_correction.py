"""What a wrong curve is corrected by: the right number of replicas, calmly, and nothing without evidence."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.correction import MOST, Correction

PERIOD_S = 10.0
rates = st.floats(1.0, 200.0)


def share(rate: float, replicas: int, each: float) -> float:
    """That `replicas` answer in time which do `each` requests per second."""
    return min(1.0, replicas * each / rate) if rate else 1.0


class Plant:
    """A service whose curve takes each replica to do one request per second, where it does `true`."""

    def __init__(self, true: float, most: int = 100, seed: int | None = None) -> None:
        self.true = true
        self.correction = Correction()
        self.replicas = 1
        self.history: list[int] = []
        self._most = most
        self._rng = np.random.default_rng(seed) if seed is not None else None

    def run(self, rate: float, periods: int) -> None:
        before = self.replicas
        for _ in range(periods):
            count = rate * PERIOD_S if self._rng is None else float(self._rng.poisson(rate * PERIOD_S))
            seen = count / PERIOD_S
            met = round(count * share(seen, self.replicas, self.true))
            same, before = before == self.replicas, self.replicas
            foreseen = partial(share, replicas=self.replicas, each=1.0) if same else None
            self.correction.observe(met, round(count) - met, seen, PERIOD_S, foreseen)
            planned = math.ceil(rate * self.correction.value * 1.02)
            self.replicas = min(self._most, max(1, planned))
            self.history.append(self.replicas)


@pytest.mark.parametrize("true", [1.0, 0.7, 0.5, 0.3])
@given(rate=st.floats(5, 60))
def test_a_curve_that_promises_too_much_is_corrected_within_minutes(true: float, rate: float) -> None:
    plant = Plant(true, most=1000)
    plant.run(rate, 60)
    settled = plant.history[20:]
    shares = [share(rate, replicas, true) for replicas in settled]
    assert np.mean(shares) >= 0.95
    assert np.mean([each < 0.9 for each in shares]) <= 0.1, "forgetting asks again, and is answered at once"
    assert max(settled) <= math.ceil(rate / true * 1.2) + 1


@pytest.mark.parametrize("true", [1.0, 1.5, 3.0])
def test_a_curve_that_promises_enough_is_left_alone(true: float) -> None:
    plant = Plant(true)
    plant.run(20, 100)
    assert plant.correction.value == pytest.approx(1.0)


@pytest.mark.parametrize("true", [1.0, 0.6, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_little(true: float, seed: int) -> None:
    plant = Plant(true, seed=seed)
    plant.run(20, 60)
    settled = len(plant.history)
    plant.run(20, 360)
    right = 20 / true
    assert 0.93 * right <= min(plant.history[settled:])
    assert max(plant.history[settled:]) <= 1.25 * right + 1


@pytest.mark.parametrize("period", [3, 10, 30])
def test_square_waves_are_answered_in_time(period: int) -> None:
    plant = Plant(0.5)
    plant.run(20, 40)
    for _ in range(10):
        plant.run(4, period)
        plant.run(20, period)
    assert share(20, plant.replicas, 0.5) >= 0.95
    assert 1.8 <= plant.correction.value <= 2.4


@pytest.mark.parametrize("later", [1.0, 5.0, 40.0])
def test_demand_that_changes_is_no_fault_of_the_curve(later: float) -> None:
    """What was refused before it changed was foreseen of what was asked then."""
    correction = Correction()
    for rate in (34.0,) * 5 + (later,) * 5:
        met = round(rate * PERIOD_S * share(rate, 30, 1.0))
        missed = round(rate * PERIOD_S) - met
        correction.observe(met, missed, rate, PERIOD_S, partial(share, replicas=30, each=1.0))
        assert correction.value <= 1.03


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500), st.floats(1, 60), st.booleans()), max_size=60), rates
)
def test_it_stays_within_its_bounds(seen: list[tuple[int, int, float, bool]], rate: float) -> None:
    correction = Correction()
    for met, missed, seconds, same in seen:
        correction.observe(met, missed, rate, seconds, (lambda asked: share(asked, 20, 1.0)) if same else None)
        assert 1.0 <= correction.value <= MOST
        assert correction.measured is None or 0 <= correction.measured <= 1


def test_few_requests_and_other_replicas_say_nothing() -> None:
    correction = Correction()
    correction.observe(5, 5, 1.0, PERIOD_S, lambda _: 1.0)
    assert correction.value == 1.0
    assert correction.measured is None
    correction.observe(500, 500, 100.0, PERIOD_S, None)
    assert correction.value == 1.0
    assert correction.measured is None


def test_what_was_learnt_is_forgotten_slowly() -> None:
    plant = Plant(0.5)
    plant.run(20, 40)
    learnt = plant.correction.value
    for _ in range(180):
        plant.correction.observe(0, 0, 0.0, PERIOD_S, None)
    assert plant.correction.value == pytest.approx(1 + (learnt - 1) / 2)


def test_a_curve_that_foresees_losses_which_do_not_come_is_trusted_less() -> None:
    correction = Correction()
    for _ in range(20):
        correction.observe(100, 100, 20.0, PERIOD_S, lambda asked: min(1.0, 20 / asked))
    assert correction.value == pytest.approx(2.0, rel=0.05)
    for _ in range(20):
        correction.observe(200, 0, 20.0, PERIOD_S, lambda asked: min(1.0, 24 / asked))
    assert correction.value == pytest.approx(1.2, rel=0.05)
