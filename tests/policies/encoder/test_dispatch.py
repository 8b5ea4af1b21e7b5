"""The dispatcher's contracts, one by one; `test_algorithm_1` holds it against a reference."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.admission import DeadlineError
from pliant.policies.encoder.dispatch import Dispatcher, NoRuntimeError, _least_congested


def load(dispatcher: Dispatcher[str], replica: str, max_length: int, service_s: float, outstanding: int) -> None:
    """Give a replica its outstanding requests while no other replica can get them, and leave it suspended."""
    dispatcher.assign(replica, max_length, service_s)
    for _ in range(outstanding):
        assert dispatcher.dispatch(max_length) == replica
    dispatcher.suspend(replica)


def test_worked_example() -> None:
    """Arlo §3.4, figure 5: of the levels for length 200, 54/60 is too busy at 0.85 and 28/48 is not at 0.765.

    Once all are too busy, the next request goes where it costs least.
    """
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=0.24, threshold=0.85, decay=0.9, peek=3)
    runtimes = {"q1": (128, 0.002, 3), "q2": (256, 0.004, 54), "q3": (384, 0.005, 28), "q4": (512, 0.006, 11)}
    instances = {
        f"{queue}-{extra}": (max_length, service_s, outstanding + extra)
        for queue, (max_length, service_s, outstanding) in runtimes.items()
        for extra in (0, 1)
    }
    for replica, (max_length, service_s, outstanding) in instances.items():
        load(dispatcher, replica, max_length, service_s, outstanding)
    for replica, (max_length, service_s, _) in instances.items():
        dispatcher.assign(replica, max_length, service_s)

    assert dispatcher.dispatch(200) == "q3-0"
    queues = [dispatcher.dispatch(200)[:2] for _ in range(200)]
    at_37_of_48 = 2 * 37 - (28 + 29) - 1
    at_28_of_40 = 2 * 28 - (11 + 12)
    assert queues[:at_37_of_48] == ["q3"] * at_37_of_48
    assert queues[at_37_of_48:][:at_28_of_40] == ["q4"] * at_28_of_40
    assert set(queues[at_37_of_48 + at_28_of_40 :]) == {"q2", "q3", "q4"}
    costs = {
        runtimes[replica[:2]][1] * (outstanding + 2)
        for level in list(dispatcher.levels().values())[1:]
        for replica, outstanding in level.items()
    }
    assert max(costs) - min(costs) <= 0.006


def test_every_length_fits_its_runtime() -> None:
    dispatcher: Dispatcher[int] = Dispatcher(slo_s=1.0)
    for max_length in (64, 512, 8192):
        dispatcher.assign(max_length, max_length, 0.1)
    for length in range(8193):
        replica = dispatcher.dispatch(length)
        assert replica == next(held for held in (64, 512, 8192) if held >= length)
        dispatcher.complete(replica)


def test_no_level_beyond_peek_is_looked_at() -> None:
    dispatcher: Dispatcher[int] = Dispatcher(slo_s=1.0, peek=2)
    for max_length in (1, 2, 3):
        dispatcher.assign(max_length, max_length, 1.0)
    assert [dispatcher.dispatch(1) for _ in range(4)] == [1, 2, 1, 2]
    with pytest.raises(DeadlineError):
        dispatcher.dispatch(1, budget_s=1.0)
    assert dispatcher.outstanding(3) == 0


def test_no_runtime_says_what_is_there() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    with pytest.raises(NoRuntimeError, match="no replica is ready"):
        dispatcher.dispatch(0)
    dispatcher.assign("a", 64, 0.1)
    with pytest.raises(NoRuntimeError, match="65 tokens; the longest is 64") as error:
        dispatcher.dispatch(65)
    assert (error.value.length, error.value.longest) == (65, 64)


def test_equal_replicas_take_turns() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    for name in "abcdefgh":
        dispatcher.assign(name, 64, 0.1)
    for _ in range(3):
        turn = []
        for _ in range(8):
            turn.append(dispatcher.dispatch(1))
            dispatcher.complete(turn[-1])
        assert sorted(turn) == list("abcdefgh")


def test_a_faster_replica_of_the_level_gets_more() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    dispatcher.assign("slow", 64, 0.05)
    dispatcher.assign("fast", 64, 0.0125)
    assert Counter(dispatcher.dispatch(1) for _ in range(100)) == {"fast": 80, "slow": 20}


def test_the_next_best_leads_when_the_head_of_its_level_leaves() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    load(dispatcher, "busy", 64, 0.1, outstanding=5)
    load(dispatcher, "slow", 64, 0.2, outstanding=1)
    for replica, service_s in (("busy", 0.1), ("slow", 0.2), ("idle", 0.1)):
        dispatcher.assign(replica, 64, service_s)
    dispatcher.suspend("idle")
    assert dispatcher.dispatch(1) == "slow"


def test_switching_keeps_the_count_and_death_forgets_it() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    dispatcher.assign("a", 64, 0.1)
    dispatcher.dispatch(1)
    dispatcher.dispatch(1)
    dispatcher.suspend("a")
    with pytest.raises(NoRuntimeError):
        dispatcher.dispatch(1)
    dispatcher.complete("a")
    dispatcher.assign("a", 128, 0.2)
    assert dispatcher.levels() == {128: {"a": 1}}
    dispatcher.remove("a")
    dispatcher.complete("a")
    assert dispatcher.outstanding("a") == 0
    assert dispatcher.levels() == {}


def test_a_late_ideal_level_yields_to_a_longer_one_in_time() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0, threshold=0.85)
    dispatcher.assign("short", 64, 0.1)
    dispatcher.assign("long", 512, 0.25)
    assert [dispatcher.dispatch(1) for _ in range(3)] == ["short"] * 3
    assert dispatcher.dispatch(1, budget_s=0.3) == "long"
    assert dispatcher.dispatch(1, budget_s=0.4) == "short"


def test_a_refusal_counts_nothing_and_its_retry_succeeds() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    dispatcher.assign("a", 64, 0.1)
    for _ in range(5):
        dispatcher.dispatch(1)
    with pytest.raises(DeadlineError) as refusal:
        dispatcher.dispatch(1, budget_s=0.4)
    assert dispatcher.outstanding("a") == 5
    assert refusal.value.retry_after_s == pytest.approx(0.2)
    dispatcher.complete("a")
    dispatcher.complete("a")
    assert dispatcher.dispatch(1, budget_s=0.4) == "a"


@pytest.mark.parametrize("error", [NoRuntimeError(65, 64), DeadlineError(0.25, 0.1), DeadlineError(math.inf, 0.1)])
def test_errors_cross_processes(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    "arguments", [{"slo_s": 0}, {"threshold": 0}, {"threshold": 1.1}, {"decay": 0}, {"decay": 1.1}, {"peek": 0}]
)
def test_bad_settings(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got"):
        Dispatcher(**{"slo_s": 1.0, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_length", "service_s"), [(0, 0.1), (64, 0.0), (64, -0.1), (64, math.nan)])
def test_bad_assignments(max_length: int, service_s: float) -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    with pytest.raises(ValueError, match="must be positive"):
        dispatcher.assign("a", max_length, service_s)
    assert dispatcher.levels() == {}


@given(st.floats(0.01, 1.0), st.integers(1, 5_000))
def test_the_congestion_limit_is_the_first_count_that_reaches_the_threshold(threshold: float, capacity: int) -> None:
    expected = next(count for count in range(capacity + 1) if count / capacity >= threshold)
    assert _least_congested(threshold, capacity) == expected
