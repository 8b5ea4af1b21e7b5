"""Replicas that compute in batches, against the simulator for those that do not, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.batching import Batch, Batcher, PaddedTimes, Waiting
from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.residency import ResidentTimes
from pliant.simulation.arrivals import Recorded, Stream
from pliant.simulation.encoder.batched import BatchedSimulation
from pliant.simulation.encoder.fleet import Fleet, ResidentFleet, static_fleet
from pliant.simulation.encoder.simulator import Second, Service, Simulation

LENGTHS = (64, 128, 512)
SECONDS = {64: 0.011, 128: 0.023, 512: 0.071}
BY_LENGTH = PaddedTimes((1, 4), LENGTHS, ((0.01, 0.02, 0.08), (0.02, 0.05, 0.3)))


class OneByOne:
    """First come, first served, as replicas of one length do."""

    def next_batch(self, now: float, waiting: Sequence[Waiting]) -> Batch:
        return Batch((0,), SECONDS[512])


class Churn:
    """Stops a replica, starts another, and changes one over, again and again."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, int]] = []

    def tick(self, now: float, fleet: Fleet, second: Second) -> None:
        self.seen.append((second.answered, second.near_slo, second.above_half, second.shed))
        if int(now) % 3 == 1:
            fleet.start(now, 512, startup_s=0.4)
        if int(now) % 3 == 2 and len(fleet.holds) > 2:
            fleet.stop(now, min(fleet.holds.keys() - fleet.switching))
        if not fleet.replacing:
            fleet.replace(now, [{max(fleet.holds): 512}])


@given(
    replicas=st.integers(2, 5),
    rate=st.sampled_from([5.0, 30.0, 80.0]),
    seed=st.integers(0, 1000),
    admission=st.booleans(),
    warmup=st.integers(0, 2),
    hop_s=st.sampled_from([0.0, 0.02]),
)
def test_batches_of_one_are_the_plain_simulation(
    replicas: int, rate: float, seed: int, admission: bool, warmup: int, hop_s: float
) -> None:
    stream = Stream(np.full(8, rate), np.arange(1, 513), np.ones(8), bursty=True, seed=seed)
    service = Service(0.2, admission=admission, hops_s=(hop_s,) if hop_s else ())
    plain, batched = Churn(), Churn()
    expected = Simulation(static_fleet(0.2, [512] * replicas, SECONDS), service, [plain]).run(stream, warmup)
    fleet = static_fleet(0.2, [512] * replicas, SECONDS)
    found = BatchedSimulation(fleet, service, lambda _: OneByOne(), [batched]).run(stream, warmup)
    assert (found.requests, found.shed, found.within_slo) == (expected.requests, expected.shed, expected.within_slo)
    assert found.latencies.count == expected.latencies.count
    if found.latencies.count:
        assert found.latencies.mean == pytest.approx(expected.latencies.mean)
    assert found.gpu_s == pytest.approx(expected.gpu_s)
    assert (found.arrived, found.missed) == (expected.arrived, expected.missed)
    assert (found.counts, found.running) == (expected.counts, expected.running)
    assert [seen[3] for seen in batched.seen] == [seen[3] for seen in plain.seen]
    if not (warmup or hop_s):
        assert batched.seen == plain.seen, "as soon as it is computed; the way back takes no time"


def test_a_case_by_hand() -> None:
    """The first is computed alone at once; what comes meanwhile goes together, the long one last."""
    stream = Recorded(np.array([0.0, 0.001, 0.002, 0.003, 0.004]), np.array([60, 500, 9, 10, 64]))
    fleet = static_fleet(10.0, [512], SECONDS)
    outcome = BatchedSimulation(fleet, Service(10.0, overhead_s=0.005), partial(Batcher, BY_LENGTH)).run(stream)
    finishes = [0.01, 0.01 + 0.02 + 0.08, 0.01 + 0.02, 0.01 + 0.02, 0.01 + 0.02]
    assert outcome.latencies.mean == pytest.approx(np.mean(np.array(finishes) - stream.seconds) + 0.005)
    assert outcome.busy_s == pytest.approx(0.11)


def test_what_is_measured_is_drawn_for_each_pass_and_each_request() -> None:
    stream = Recorded(np.arange(4000) / 2, np.full(4000, 500))
    service = Service(10.0, overhead_s=5.0, variation=(0.5, 1.5), hops_s=(0.1, 0.3))
    outcome = BatchedSimulation(static_fleet(10.0, [512], SECONDS), service, partial(Batcher, BY_LENGTH)).run(stream)
    assert outcome.latencies.mean == pytest.approx(0.08 + 0.2, rel=0.03)
    assert outcome.latencies.quantile(0.01) == pytest.approx(0.04 + 0.1, rel=0.01)
    assert outcome.latencies.quantile(0.99) == pytest.approx(0.12 + 0.3, rel=0.01)
    assert outcome.busy_s == pytest.approx(4000 * 0.08, rel=0.03)


def test_a_queue_that_outlasts_the_stream_is_answered() -> None:
    stream = Recorded(np.zeros(100), np.full(100, 500))
    fleet = static_fleet(1.0, [512], SECONDS)
    outcome = BatchedSimulation(fleet, Service(1.0), partial(Batcher, BY_LENGTH)).run(stream)
    assert outcome.latencies.count == outcome.requests == 100
    assert outcome.missed == [100 - outcome.within_slo]


def test_residents_have_homes_that_change_at_once() -> None:
    dispatcher: Dispatcher[int] = Dispatcher(1.0)
    fleet = ResidentFleet(dispatcher, [64, 512], ResidentTimes.constant(SECONDS), 512)
    assert fleet.service_s(64) == SECONDS[64]
    assert [dispatcher.dispatch(length)[0] for length in (500, 60)] == [1, 0]
    fleet.replace(1.0, [{0: 512}, {1: 64}])
    assert not fleet.replacing
    assert fleet.counts() == {64: 1, 512: 1}
    assert dispatcher.groups() == {64: {1: pytest.approx(0.071)}, 512: {0: pytest.approx(0.011)}}
