"""The schemes that are compared, on one simulated fleet: dispatchers, allocations, and who is faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.bench.encoder import simulated
from pliant.bench.encoder.baseline_dispatch import BaselineDispatcher, LeastBusy, Packing
from pliant.bench.encoder.profiles import BASE, LARGE, Measured
from pliant.bench.encoder.schemes import Setting, arrived, proportional, simulation
from pliant.bench.encoder.simulated_runs import QUICK, Repeated, Runs
from pliant.bench.gpu import profiles
from pliant.bench.workloads import twitter
from pliant.policies.encoder.service_curve import ServiceCurve
from pliant.simulation.encoder.outcome import Outcome

SCHEMES = ("sets", "no_homes", "arlo", "st", "dt", "infaas", "ilb", "ig", "even")


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_request_is_counted_once_and_the_seed_decides_all(scheme: str, batch: int) -> None:
    setting = Setting(BASE, 10, most=16 if scheme in ("arlo", "dt") else 0, spare=0.3, batch=batch)
    outcomes = []
    for seed in (1, 1, 2):
        stream = twitter(None, 1500, 10, seed, bursty=True, alike=0.3)
        outcomes.append(simulation(scheme, setting).run(stream))
        assert outcomes[-1].requests == sum(len(second.seconds) for second in stream) == sum(outcomes[-1].arrived)
        assert outcomes[-1].latencies.count == outcomes[-1].requests
        assert outcomes[-1].shed == 0
        assert sum(outcomes[-1].missed) == outcomes[-1].requests - outcomes[-1].within_slo
    once, again, other = outcomes
    assert summary(once) == summary(again) != summary(other)


def summary(outcome: Outcome) -> tuple[float, ...]:
    return outcome.latencies.mean, outcome.latencies.quantile(0.98), outcome.busy_s, outcome.gpu_s


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
    """Where little is queued: as far as in Figure 6, by 70% and 24%."""
    stream = twitter(None, 1200, 40, seed=3, bursty=False)
    means = {name: simulation(name, Setting(BASE, 10)).run(stream, 20).latencies.mean for name in ("arlo", "st", "dt")}
    assert means["arlo"] < 0.5 * means["st"]
    assert means["arlo"] / means["dt"] == pytest.approx(1 - 0.237, abs=0.03)


def test_what_the_dynamic_runtime_takes_longer_falls_with_the_length() -> None:
    for profile in (BASE, LARGE):
        inflations = [profile.inflation(length) for length in range(1, 513)]
        assert inflations == sorted(inflations, reverse=True)
        assert (inflations[0], inflations[-1]) == (pytest.approx(3.56), pytest.approx(1.22, abs=0.001))


def test_a_batch_takes_as_long_as_one_text_of_as_many_tokens() -> None:
    times = BASE.padded_times((64, 512), 8)
    assert times.sizes == (1, 2, 4, 8)
    assert times.seconds([64] * 8)[-1] == pytest.approx(BASE.static_s(512))
    assert BASE.mean_static_s(np.array([1, 64, 65])) == pytest.approx((2 * BASE.static_s(64) + BASE.static_s(128)) / 3)


def measured() -> Measured:
    alone = {"64": 0.001, "128": 0.003, "512": 0.002}
    table = {
        "static_s": alone,
        "dynamic_s": {"64": 0.005, "512": 0.006},
        "packed_s": {"64": 1.0, "512": 2.0},
        "packed_s_by_texts": {"1": 0.001, "8": 0.002, "32": 0.005},
    }
    return Measured.of("a GPU", table)


def test_a_gpu_takes_what_was_measured_and_no_more_for_a_text_than_for_a_longer_one(tmp_path: Path) -> None:
    profile = measured()
    assert [profile.static_s(tokens) for tokens in (1, 64, 65, 128, 512)] == pytest.approx(
        [0.001, 0.001, 0.002, 0.002, 0.002]
    )
    assert [profile.dynamic_s(tokens) for tokens in (1, 64, 288, 512)] == pytest.approx([0.005, 0.005, 0.0055, 0.006])
    assert profile.batch_s(1, 64) == profile.static_s(64)
    assert profile.batch_s(8, 64) == pytest.approx(0.001 + 0.001), "what eight packed texts take more than one"
    assert profile.batch_s(32, 64) == pytest.approx(0.001 + 0.004)
    assert profile.batch_s(64, 64) == pytest.approx(0.001 + 0.008), "as much more as from 8 to 32 texts"
    assert profile.dynamic_s(64, 8) == pytest.approx(0.005 + 0.001)
    profile.write(tmp_path / "profile.json")
    assert Measured.read(tmp_path / "profile.json") == profile
    times = profile.padded_times((64, 512), 8)
    assert times.seconds([64] * 8)[-1] == pytest.approx(profile.batch_s(8, 64))


def test_what_is_simulated_on_a_measured_gpu_is_told_apart(tmp_path: Path) -> None:
    measured().write(tmp_path / "profile-encoders.json")
    short = replace(QUICK, seeds=range(1), latencies={2: 1}, on_gpu={1: 1}, testbed=1)
    runs, found = Runs(None, short), Repeated()
    for step in simulated.on_gpu(profiles.measured_encoder(tmp_path)):
        step(runs, found)
    names = [figure.name for figure in found.figures]
    assert len(names) == len(set(names)) == 3 + 2 * 4 + 2 * 3
    assert all(name.endswith("_gpu") for name in names)
    assert all(figure.value > 0 for figure in found.figures)


def test_homes_and_the_room_for_all_lengths_pay_when_queues_form() -> None:
    stream = twitter(None, 2600, 20, seed=4, bursty=True, alike=0.3)
    setting = Setting(BASE, 10, batch=32)
    known = replace(setting, demand=arrived(setting.lengths, stream))
    sets, no_homes, one = (simulation(name, known).run(stream).latencies.mean for name in ("sets", "no_homes", "arlo"))
    assert sets < no_homes < one


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
