"""What a text is expected to take: interpolated, corrected by what is observed, and forgetful."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.service_curve import ServiceCurve, ServiceTimes, lengths_to_measure

DYNAMIC = {16: 0.004, 128: 0.01, 512: 0.06}
GRID = 1.1 + 1e-6


def test_a_runtime_that_pads_takes_the_same_for_all_texts() -> None:
    curve = ServiceTimes({512: 0.02}).curve(0.0)
    assert {curve.seconds(length) for length in (1, 100, 512)} == {curve.seconds(512)}
    assert 0.02 <= curve.seconds(512) <= 0.02 * GRID
    assert ServiceCurve.constant(0.02).tables(9)[0].tolist() == [0.02] * 10


def test_what_lies_between_measured_lengths_is_interpolated() -> None:
    curve = ServiceCurve(((16, 0.004, 0.004), (128, 0.018, 0.018)))
    assert curve.seconds(1) == curve.seconds(16) == 0.004
    assert curve.seconds(72) == pytest.approx(0.011)
    expected, idle, _ = curve.tables(128)
    assert len(expected) == len(idle) == 129
    assert expected.tolist() == [curve.seconds(length) for length in range(129)]


@given(st.dictionaries(st.integers(1, 40), st.floats(0.001, 1.0), min_size=1, max_size=5))
def test_of_a_set_each_text_has_the_fastest_runtime_that_it_fits_into(service_s: dict[int, float]) -> None:
    longest = max(service_s)
    curve = ServiceCurve.of_set({length: ServiceCurve.constant(seconds) for length, seconds in service_s.items()})
    for length in range(1, longest + 1):
        least = min(seconds for max_length, seconds in service_s.items() if max_length >= length)
        assert curve.seconds(length) == curve.idle_seconds(length) == pytest.approx(least)
        assert curve.work_seconds(length) == pytest.approx(least)


def test_of_a_set_runtimes_that_do_not_pad_keep_their_curves() -> None:
    short = ServiceCurve(((8, 0.001, 0.002), (16, 0.002, 0.003)), (0.5, 1.0))
    curve = ServiceCurve.of_set({16: short, 64: ServiceCurve(((16, 0.01, 0.01), (64, 0.04, 0.04)))})
    assert [curve.seconds(length) for length in (1, 12, 16, 40)] == pytest.approx([0.001, 0.0015, 0.002, 0.025])
    assert curve.work_seconds(8) == pytest.approx(0.0005)


def test_where_runtimes_are_measured() -> None:
    assert lengths_to_measure(512, dynamic=False) == (512,)
    assert lengths_to_measure(512, dynamic=True) == (16, 32, 64, 128, 256, 512)
    assert lengths_to_measure(100, dynamic=True) == (13, 25, 50, 100)
    assert lengths_to_measure(8, dynamic=True) == (8,)


def test_an_odd_measurement_of_a_short_text_is_corrected_by_a_longer_one() -> None:
    curve = ServiceTimes({16: 0.5, 128: 0.01, 512: 0.06}).curve(0.0)
    assert curve.seconds(16) == curve.seconds(128) <= 0.01 * GRID


def test_equal_replicas_report_equal_corrections_whatever_the_noise() -> None:
    curves = set()
    for seed in range(20):
        rng = random.Random(seed)
        times = ServiceTimes(DYNAMIC)
        for now in range(100):
            length = rng.randint(1, 512)
            times.observe(now / 10, length, times.curve(0.0).seconds(length) * rng.uniform(0.85, 1.05))
        curves.add(times.curve(10.0))
    assert curves == {ServiceTimes(DYNAMIC).curve(0.0)}


def test_a_machine_that_is_twice_as_slow_is_believed_at_all_lengths() -> None:
    times = ServiceTimes(DYNAMIC)
    for now in range(32):
        times.observe(now / 10, 16, 2 * DYNAMIC[16])
    curve = times.curve(3.2)
    for length, measured_s in DYNAMIC.items():
        assert 1.8 * measured_s < curve.seconds(length) < 2.2 * GRID * measured_s


def test_after_short_texts_a_long_one_is_still_expected_to_take_long() -> None:
    """12 texts of 512 tokens with 60 ms each were all admitted; the last took 566 ms."""
    measured = {16: 0.003, 128: 0.012, 512: 0.047}
    times = ServiceTimes(measured)
    for now in range(500):
        times.observe(now / 100, 16, 0.003)
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=0.06)
    dispatcher.assign("a", 512, times.curve(5.0))
    dispatcher.dispatch(512, budget_s=0.06)
    with pytest.raises(Exception, match="retry after"):
        dispatcher.dispatch(512, budget_s=0.06)
    assert dispatcher.dispatch(16, budget_s=0.06)[1] < 0.06


def test_texts_shorter_than_any_measured_say_nothing_of_longer_ones_unless_they_are_slow() -> None:
    per_token = {length: length * 1e-3 for length in lengths_to_measure(512, dynamic=True)}
    times = ServiceTimes(per_token)
    before = times.curve(0.0)
    for _ in range(32):
        times.observe(1.0, 8, 8e-3)
    assert times.curve(1.0) == before
    for _ in range(32):
        times.observe(2.0, 8, 64e-3)
    assert times.curve(2.0).seconds(16) > before.seconds(16)


def test_a_few_odd_observations_change_nothing() -> None:
    times = ServiceTimes(DYNAMIC)
    for now in (1.0, 1.1, 1.2):
        times.observe(now, 512, 10.0)
    assert times.curve(1.3) == ServiceTimes(DYNAMIC).curve(0.0)


@pytest.mark.parametrize("length", [10, 512])
def test_an_estimate_above_the_slo_does_not_refuse_for_ever(length: int) -> None:
    """Texts of 10 tokens were refused by an idle replica, because its first estimate was that of 512."""
    times = ServiceTimes(DYNAMIC)
    slo_s = 1.5 * times.curve(0.0).seconds(length)
    for now in range(32):
        times.observe(now / 32, length, 100 * slo_s)
    dispatcher: Dispatcher[str] = Dispatcher(slo_s)
    wrong = times.curve(1.0)
    assert wrong.seconds(length) > slo_s
    dispatcher.assign("a", 512, wrong)
    _, _, work = dispatcher.dispatch(length, budget_s=slo_s)
    with pytest.raises(Exception, match="retry after"):
        dispatcher.dispatch(length, budget_s=slo_s)
    dispatcher.complete("a", work)
    dispatcher.dispatch(length, budget_s=slo_s)
    assert times.curve(32.0) == ServiceTimes(DYNAMIC).curve(0.0)


@given(
    measured=st.dictionaries(st.integers(1, 4096), st.floats(1e-4, 10), min_size=1, max_size=8),
    observed=st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 100)), max_size=60),
)
def test_a_curve_rises_stays_within_bounds_and_returns(
    measured: dict[int, float], observed: list[tuple[int, float]]
) -> None:
    times = ServiceTimes(measured)
    before = times.curve(0.0)
    for now, (length, seconds) in enumerate(observed):
        times.observe(now * 0.01, length, seconds)
    curve = times.curve(0.6)
    expected, idle, _ = curve.tables(4096)
    assert (expected[1:] >= expected[:-1]).all()
    assert (idle <= expected).all()
    assert (expected <= 4.2 * before.tables(4096)[0]).all()
    assert (expected * 4.2 >= before.tables(4096)[0]).all()
    assert times.curve(31.0) == before
    assert pickle.loads(pickle.dumps(curve)) == curve == ServiceCurve(tuple(curve.points))
    assert hash(curve) == hash(ServiceCurve(curve.points))


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0, 0.1, 0.1),),
        ((64, 0.0, 0.1),),
        ((64, 0.1, float("nan")),),
        ((64, float("inf"), 0.1),),
        ((64, 0.1, 0.1), (64, 0.1, 0.1)),
        ((64, 0.2, 0.1), (128, 0.1, 0.1)),
        ((64, 0.1, 0.2), (128, 0.1, 0.1)),
    ],
)
def test_bad_points(points: tuple[tuple[int, float, float], ...]) -> None:
    with pytest.raises(ValueError, match="must be positive and rise"):
        ServiceCurve(points)


@pytest.mark.parametrize("measured", [{}, {64: 0.0}, {0: 0.1}])
def test_bad_measurements(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"must be positive|math domain"):
        ServiceTimes(measured)


def test_texts_that_are_computed_together_hold_up_others_for_a_share_of_what_they_take() -> None:
    curve = ServiceTimes({8: 0.1, 64: 0.4}, {8: 0.25, 64: 0.75}).curve(0.0)
    assert curve.work_seconds(8) == pytest.approx(0.25 * curve.seconds(8))
    assert curve.work_seconds(36) == pytest.approx(0.5 * curve.seconds(36))
    assert curve.tables(64).work[[0, 36, 64]].tolist() == pytest.approx([curve.work_seconds(n) for n in (0, 36, 64)])
    assert ServiceCurve.constant(0.1).work_seconds(5) == 0.1
    for wrong in ((0.5, 0.5), (0.0,), (1.1,)):
        with pytest.raises(ValueError, match="a share of at most 1 for each of 1"):
            ServiceCurve(((8, 0.1, 0.1),), wrong)
