"""The simulator against queueing theory, a literal re-implementation, and the laws that any of its runs obeys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.bench.arrivals import Recorded, Stream
from pliant.bench.encoder.baseline_dispatch import BaselineDispatcher, LeastBusy, Packing
from pliant.bench.encoder.fleet import LOAD_S, Fleet, static_fleet
from pliant.bench.encoder.outcome import Latencies, Outcome
from pliant.bench.encoder.profiles import BASE, LARGE
from pliant.bench.encoder.schemes import Setting, arrived, proportional, simulation
from pliant.bench.encoder.simulator import Second, Service, Simulation
from pliant.bench.workloads import twitter
from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.service_curve import ServiceCurve

SCHEMES = ("arlo", "st", "dt", "infaas", "ilb", "ig", "even")


def poisson(rate: float, seconds: int, tokens: int, seed: int = 0) -> Stream:
    return Stream(np.full(seconds, rate), np.array([tokens]), np.ones(seconds), bursty=False, seed=seed)


def requests(*pairs: tuple[float, int]) -> Recorded:
    return Recorded(np.array([pair[0] for pair in pairs], float), np.array([pair[1] for pair in pairs], np.int64))


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_mean_latency_of_an_m_d_1_queue(load: float) -> None:
    """Pollaczek and Khinchine: the mean wait is load / (2 (1 - load)) service times."""
    service_s = 0.01
    fleet = static_fleet(1e6, [64], {64: service_s})
    outcome = Simulation(fleet, Service(1e6)).run(poisson(load / service_s, 3000, tokens=64))
    assert outcome.latencies.mean == pytest.approx(service_s * (1 + load / (2 * (1 - load))), rel=0.06)
    assert outcome.utilisation == pytest.approx(load, rel=0.02)


def test_a_case_by_hand() -> None:
    """Two replicas for 64 tokens and one for 128: the least busy that fits, first come first served."""
    fleet = static_fleet(100.0, [64, 64, 128], {64: 0.1, 128: 0.3})
    outcome = Simulation(fleet, Service(0.35, overhead_s=0.01)).run(
        requests((0.0, 10), (0.0, 10), (0.05, 64), (0.05, 65), (0.2, 128), (1.5, 1))
    )
    latencies = [0.11, 0.11, 0.16, 0.31, 0.46, 0.11]
    assert outcome.requests == outcome.latencies.count == 6
    assert outcome.latencies.mean == pytest.approx(np.mean(latencies))
    assert outcome.within_slo == 5
    assert outcome.busy_s == pytest.approx(4 * 0.1 + 2 * 0.3)
    assert (outcome.seconds, outcome.gpus, outcome.arrived, outcome.missed) == (2, 3.0, [5, 1], [1, 0])


def literal(held: Sequence[int], service_s: Mapping[int, float], slo_s: float, stream: Recorded) -> list[float]:
    """The same, event by event: every completion is a line in a list that is searched from the start."""
    dispatcher: Dispatcher[int] = Dispatcher(slo_s)
    for replica, max_length in enumerate(held):
        dispatcher.assign(replica, max_length, ServiceCurve.constant(service_s[max_length]))
    finishes: list[tuple[float, int, int]] = []
    latencies = []
    for time, tokens in zip(stream.seconds.tolist(), stream.tokens.tolist(), strict=True):
        for finish, replica, work in sorted(finishes):
            if finish <= time:
                finishes.remove((finish, replica, work))
                dispatcher.complete(replica, work)
        replica, _, work = dispatcher.dispatch(tokens)
        before = [finish for finish, other, _ in finishes if other == replica]
        finish = max([time, *before]) + service_s[held[replica]]
        finishes.append((finish, replica, work))
        latencies.append(finish - time)
    return latencies


@given(
    held=st.lists(st.sampled_from([32, 64, 128]), max_size=6),
    gaps=st.lists(st.sampled_from([0.0, 0.003, 0.011, 0.4]), min_size=1, max_size=60),
    seed=st.integers(0, 1000),
)
def test_equals_a_literal_simulation(held: list[int], gaps: list[float], seed: int) -> None:
    held = [*held, 128]
    service_s = {32: 0.013, 64: 0.029, 128: 0.057}
    tokens = np.random.default_rng(seed).integers(1, 129, len(gaps))
    stream = Recorded(np.cumsum(gaps), tokens)
    fleet = static_fleet(0.2, held, service_s)
    outcome = Simulation(fleet, Service(0.2)).run(stream)
    expected = literal(held, service_s, 0.2, stream)
    assert outcome.requests == len(expected)
    assert outcome.latencies.mean == pytest.approx(np.mean(expected))
    assert outcome.within_slo == sum(latency <= 0.2 for latency in expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_request_is_counted_once_and_the_seed_decides_all(scheme: str) -> None:
    setting = Setting(BASE, 10, most=16 if scheme in ("arlo", "dt") else 0, spare=0.3)
    outcomes = []
    for seed in (1, 1, 2):
        stream = twitter(None, 1500, 30, seed, bursty=True)
        outcomes.append(simulation(scheme, setting).run(stream))
        assert outcomes[-1].requests == sum(len(second.seconds) for second in stream) == sum(outcomes[-1].arrived)
        assert outcomes[-1].latencies.count == outcomes[-1].requests
        assert outcomes[-1].shed == 0
        assert sum(outcomes[-1].missed) == outcomes[-1].requests - outcomes[-1].within_slo
    once, again, other = outcomes
    assert summary(once) == summary(again) != summary(other)


def summary(outcome: Outcome) -> tuple[float, ...]:
    return outcome.latencies.mean, outcome.latencies.quantile(0.98), outcome.busy_s, outcome.gpu_s


class Rotation:
    """Turns every replica into the next longer runtime, again and again."""

    def __init__(self) -> None:
        self.moves = 0

    def tick(self, now: float, fleet: Fleet, second: Second) -> None:
        if not fleet.replacing:
            following = {64: 128, 128: 512, 512: 64}
            batches = [{replica: following[held]} for replica, held in fleet.holds.items()]
            self.moves += len(batches)
            fleet.replace(now, batches)


def test_replacement_drains_loads_and_loses_nothing() -> None:
    held = [64, 64, 128, 128, 512, 512, 512]
    rotation = Rotation()
    fleet = static_fleet(100.0, held, {64: 0.01, 128: 0.02, 512: 0.05})
    stream = poisson(40, 60, tokens=60)
    outcome = Simulation(fleet, Service(100.0), [rotation]).run(stream)
    assert rotation.moves > 2 * len(held)
    assert outcome.latencies.count == outcome.requests == sum(len(second.seconds) for second in stream)
    assert outcome.gpus == pytest.approx(len(held))


def test_a_replica_that_changes_over_answers_what_it_has_and_is_out_for_the_load() -> None:
    class Once:
        def tick(self, now: float, fleet: Fleet, second: Second) -> None:
            if now == 1.0:
                fleet.replace(now, [{0: 128}])

    def latency(*pairs: tuple[float, int]) -> float:
        fleet = static_fleet(100.0, [64, 512], {64: 0.4, 128: 0.1, 512: 5.0})
        return Simulation(fleet, Service(100.0), [Once()]).run(requests(*pairs)).latencies.mean

    assert latency((0.9, 64), (1.2, 64)) == pytest.approx((0.4 + 5.0) / 2)
    loaded = 0.9 + 0.4 + LOAD_S
    assert latency((0.9, 64), (loaded - 0.01, 64)) == pytest.approx((0.4 + 5.0) / 2)
    assert latency((0.9, 64), (loaded + 0.01, 64)) == pytest.approx((0.4 + 0.1) / 2)


def test_a_replica_that_stops_answers_what_it_has_and_then_frees_its_gpu() -> None:
    class Once:
        def tick(self, now: float, fleet: Fleet, second: Second) -> None:
            if now == 1.0:
                fleet.stop(now, 0)
                fleet.start(now, 64, startup_s=1.5)

    fleet = static_fleet(100.0, [64, 64], {64: 0.5})
    outcome = Simulation(fleet, Service(100.0), [Once()]).run(requests(*[(0.9, 1)] * 4, (3.9, 1)))
    assert outcome.latencies.mean == pytest.approx((2 * 0.5 + 2 * 1.0 + 0.5) / 5)
    assert outcome.running == [3, 2, 2, 2]
    assert outcome.gpu_s == pytest.approx(2 + 2.9 + 2 + 2)


def test_steering_sees_answers_when_they_are_given_not_before() -> None:
    seen: list[tuple[int, int, int]] = []

    class Watch:
        def tick(self, now: float, fleet: Fleet, second: Second) -> None:
            seen.append((second.answered, second.near_slo, second.above_half))

    fleet = static_fleet(100.0, [64], {64: 0.7})
    Simulation(fleet, Service(2.0), [Watch()]).run(requests((0.1, 5), (0.1, 5), (0.1, 5), (3.5, 5)))
    assert seen == [(1, 0, 0), (1, 0, 1), (1, 1, 1), (0, 0, 0)]


def test_admission_sheds_what_would_be_late() -> None:
    fleet = static_fleet(0.25, [64], {64: 0.1})
    outcome = Simulation(fleet, Service(0.25, admission=True)).run(requests(*[(0.0, 9)] * 5))
    assert (outcome.requests, outcome.shed, outcome.within_slo) == (5, 3, 2)
    assert outcome.latencies.count == 2


def test_service_times_can_vary_as_measured() -> None:
    fleet = static_fleet(100.0, [64], {64: 0.1})
    outcome = Simulation(fleet, Service(100.0, variation=(0.5, 1.5))).run(poisson(0.05, 20_000, tokens=9))
    assert outcome.latencies.mean == pytest.approx(0.1, rel=0.05)
    assert outcome.latencies.quantile(0.25) == pytest.approx(0.05, rel=0.01)
    assert outcome.latencies.quantile(0.9) == pytest.approx(0.15, rel=0.01)


def test_quantiles_are_within_half_a_percent() -> None:
    seconds = np.random.default_rng(0).lognormal(-5, 1.5, 100_000)
    latencies = Latencies()
    latencies.add(seconds[:30_000])
    latencies.add(seconds[30_000:])
    assert latencies.mean == pytest.approx(seconds.mean())
    for share in (0.01, 0.5, 0.98, 0.999):
        assert latencies.quantile(share) == pytest.approx(np.quantile(seconds, share), rel=0.005)
    values, shares = latencies.cdf()
    assert shares[-1] == 1.0
    assert np.interp(np.median(seconds), values, shares) == pytest.approx(0.5, abs=0.01)


def test_warmup_is_left_out() -> None:
    fleet = static_fleet(100.0, [64], {64: 0.1})
    outcome = Simulation(fleet, Service(100.0)).run(requests((0.0, 1), (0.0, 1), (2.5, 1)), warmup=1)
    assert (outcome.requests, outcome.seconds) == (1, 2)
    assert outcome.latencies.mean == pytest.approx(0.1)


def sent(dispatcher: BaselineDispatcher, lengths: Sequence[int]) -> list[int]:
    return [dispatcher.dispatch(length)[0] for length in lengths]


def test_packing_fills_a_replica_before_it_uses_the_next() -> None:
    dispatcher = Packing(room_s=0.3)
    for replica, (max_length, service_s) in enumerate([(64, 0.1), (64, 0.1), (512, 0.2)]):
        dispatcher.assign(replica, max_length, ServiceCurve.constant(service_s))
    assert sent(dispatcher, [9] * 6) == [0, 0, 0, 1, 1, 1]
    assert sent(dispatcher, [9] * 2) == [2, 2]
    assert sent(dispatcher, [9]) == [0], "none has room: where it waits least, the shortest first"
    dispatcher.complete(1, 1)
    assert sent(dispatcher, [9]) == [1]
    dispatcher.suspend(1)
    dispatcher.complete(2, 1)
    assert sent(dispatcher, [9, 100]) == [2, 2]


def test_least_busy_goes_where_a_request_waits_least() -> None:
    dispatcher = LeastBusy()
    for replica, (max_length, service_s) in enumerate([(64, 0.1), (512, 0.15)]):
        dispatcher.assign(replica, max_length, ServiceCurve.constant(service_s))
    assert sent(dispatcher, [9, 9, 9, 9, 100]) == [0, 1, 0, 1, 1]


@given(
    loads=st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(any),
    replicas=st.integers(1, 50),
)
def test_proportional_shares_out_all_replicas_and_covers_the_longest(loads: list[float], replicas: int) -> None:
    lengths = range(64, 64 * len(loads) + 1, 64)
    counts = proportional(lengths, loads, replicas)
    assert sum(counts.values()) == replicas
    assert counts[lengths[-1]] >= 1
    for length, load in zip(lengths, loads, strict=True):
        assert counts[length] <= np.ceil(replicas * load / sum(loads)) + (length == lengths[-1])


def test_arlo_beats_what_pads_and_what_is_dynamic() -> None:
    """A coarse check of direction, at a load that all of them can carry."""
    stream = twitter(None, 1200, 40, seed=3, bursty=False)
    means = {name: simulation(name, Setting(BASE, 10)).run(stream, 20).latencies.mean for name in ("arlo", "st", "dt")}
    assert means["arlo"] < 0.7 * min(means["st"], means["dt"])


def test_knowing_the_whole_trace_helps_an_allocation_that_never_changes() -> None:
    setting = Setting(LARGE, 8, overhead_s=0.0)
    stream = twitter(None, 900, 40, seed=5, bursty=False)
    known = replace(setting, demand=arrived(setting.lengths, stream))
    assert sum(known.demand) == pytest.approx(900, rel=0.05)
    even, informed = (simulation(name, known).run(stream).latencies.mean for name in ("even", "global"))
    assert informed < even


def test_allocation_is_recorded_for_each_second() -> None:
    outcome = simulation("arlo", Setting(BASE, 10)).run(twitter(None, 1000, 20, seed=1, bursty=False))
    assert len(outcome.counts) == len(outcome.running) == 20
    assert {sum(counts.values()) for counts in outcome.counts} == {10}
    assert Counter(outcome.counts[-1]) != Counter(outcome.counts[0])
