"""The dispatcher's contracts, one by one; `test_algorithm_1` holds it against a reference."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest

from pliant.policies.encoder.admission import DeadlineError
from pliant.policies.encoder.dispatch import Algorithm1, AllAvoidedError, Dispatcher, NoRuntimeError
from pliant.policies.encoder.residency import ResidentTimes
from pliant.policies.encoder.service_curve import ServiceCurve
from pliant.policies.encoder.shares import shares


def assign(dispatcher: Dispatcher[Any], replica: Hashable, max_length: int, service_s: float) -> None:
    dispatcher.assign(replica, max_length, ServiceCurve.constant(service_s))


def choose(dispatcher: Dispatcher[str], length: int = 1, budget_s: float | None = None) -> str:
    replica, _, _ = dispatcher.dispatch(length, budget_s)
    return replica


def load(dispatcher: Dispatcher[str], replica: str, max_length: int, service_s: float, outstanding: int) -> None:
    """Give a replica its outstanding requests while no other replica can get them, and leave it suspended."""
    assign(dispatcher, replica, max_length, service_s)
    for _ in range(outstanding):
        assert choose(dispatcher, max_length) == replica
    dispatcher.suspend(replica)


def test_worked_example() -> None:
    """Arlo §3.4, figure 5: of the groups for length 200, 54/60 is too busy at 0.85 and 28/48 is not at 0.765.

    Once all are too busy, the next requests are queued at the text's home.
    """
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=0.24, algorithm_1=Algorithm1(peek=3))
    runtimes = {"q1": (128, 0.002, 3), "q2": (256, 0.004, 54), "q3": (384, 0.005, 28), "q4": (512, 0.006, 11)}
    instances = {
        f"{queue}-{extra}": (max_length, service_s, outstanding + extra)
        for queue, (max_length, service_s, outstanding) in runtimes.items()
        for extra in (0, 1)
    }
    for replica, (max_length, service_s, outstanding) in instances.items():
        load(dispatcher, replica, max_length, service_s, outstanding)
    for replica, (max_length, service_s, _) in instances.items():
        assign(dispatcher, replica, max_length, service_s)

    assert choose(dispatcher, 200) == "q3-0"
    queues = [choose(dispatcher, 200)[:2] for _ in range(200)]
    at_37_of_48 = 2 * 37 - (28 + 29) - 1
    at_28_of_40 = 2 * 28 - (11 + 12)
    assert queues[:at_37_of_48] == ["q3"] * at_37_of_48
    assert queues[at_37_of_48:][:at_28_of_40] == ["q4"] * at_28_of_40
    assert set(queues[at_37_of_48 + at_28_of_40 :]) == {"q2"}


def test_every_length_fits_its_runtime() -> None:
    dispatcher: Dispatcher[int] = Dispatcher(slo_s=1.0)
    for max_length in (64, 512, 8192):
        assign(dispatcher, max_length, max_length, 0.1)
    for length in range(8193):
        replica, _, work = dispatcher.dispatch(length)
        assert replica == next(held for held in (64, 512, 8192) if held >= length)
        dispatcher.complete(replica, work)


def test_no_level_beyond_peek_is_looked_at() -> None:
    dispatcher: Dispatcher[int] = Dispatcher(slo_s=1.0, algorithm_1=Algorithm1(threshold=1e-6, peek=2))
    for max_length in (1, 2, 3):
        assign(dispatcher, max_length, max_length, 1.0)
    assert [dispatcher.dispatch(1)[0] for _ in range(4)] == [1, 2, 1, 1]
    with pytest.raises(DeadlineError):
        dispatcher.dispatch(1, budget_s=1.0)
    assert dispatcher.sent_s(3) == 0


def test_no_runtime_says_what_is_there() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    with pytest.raises(NoRuntimeError, match="no replica is ready"):
        dispatcher.dispatch(0)
    assign(dispatcher, "a", 64, 0.1)
    with pytest.raises(NoRuntimeError, match="65 tokens; the longest is 64") as error:
        dispatcher.dispatch(65)
    assert (error.value.length, error.value.longest) == (65, 64)


def test_equal_replicas_take_turns() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    for name in "abcdefgh":
        assign(dispatcher, name, 64, 0.1)
    for _ in range(3):
        turn = []
        for _ in range(8):
            replica, _, work = dispatcher.dispatch(1)
            turn.append(replica)
            dispatcher.complete(replica, work)
        assert sorted(turn) == list("abcdefgh")


def test_a_faster_replica_of_the_level_gets_more() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    assign(dispatcher, "slow", 64, 0.05)
    assign(dispatcher, "fast", 64, 0.0125)
    assert Counter(choose(dispatcher) for _ in range(100)) == {"fast": 80, "slow": 20}


def test_the_next_best_leads_when_the_head_of_its_level_leaves() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    load(dispatcher, "busy", 64, 0.1, outstanding=5)
    load(dispatcher, "slow", 64, 0.2, outstanding=1)
    for replica, service_s in (("busy", 0.1), ("slow", 0.2), ("idle", 0.1)):
        assign(dispatcher, replica, 64, service_s)
    dispatcher.suspend("idle")
    assert choose(dispatcher) == "slow"


def test_switching_keeps_the_work_and_death_forgets_it() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    assign(dispatcher, "a", 64, 0.1)
    _, _, work = dispatcher.dispatch(1)
    dispatcher.dispatch(1)
    dispatcher.suspend("a")
    with pytest.raises(NoRuntimeError):
        dispatcher.dispatch(1)
    dispatcher.complete("a", work)
    assign(dispatcher, "a", 128, 0.2)
    assert dispatcher.groups() == {128: {"a": pytest.approx(0.1)}}
    dispatcher.complete("a", work)
    assert dispatcher.sent_s("a") == 0
    with pytest.raises(ValueError, match="has less to do"):
        dispatcher.complete("a", work)
    dispatcher.remove("a")
    dispatcher.complete("a", work)
    assert dispatcher.groups() == {}


def test_a_late_ideal_level_yields_to_a_longer_one_in_time() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0, algorithm_1=Algorithm1())
    assign(dispatcher, "short", 64, 0.1)
    assign(dispatcher, "long", 512, 0.25)
    assert [choose(dispatcher) for _ in range(3)] == ["short"] * 3
    assert choose(dispatcher, budget_s=0.3) == "long"
    assert choose(dispatcher, budget_s=0.4) == "short"


def test_a_refusal_counts_nothing_and_its_retry_succeeds() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    assign(dispatcher, "a", 64, 0.1)
    works = [dispatcher.dispatch(1)[2] for _ in range(5)]
    with pytest.raises(DeadlineError) as refusal:
        dispatcher.dispatch(1, budget_s=0.4)
    assert dispatcher.sent_s("a") == pytest.approx(0.5)
    assert refusal.value.retry_after_s == pytest.approx(0.2)
    for work in works[:2]:
        dispatcher.complete("a", work)
    assert choose(dispatcher, budget_s=0.4) == "a"


def test_work_is_predicted_by_length() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    curve = ServiceCurve(((10, 0.01, 0.01), (500, 0.5, 0.5)))
    dispatcher.assign("a", 512, curve)
    dispatcher.assign("b", 512, curve)
    assert dispatcher.dispatch(500)[:2] == ("a", pytest.approx(0.5))
    replicas = [dispatcher.dispatch(10) for _ in range(10)]
    assert [replica for replica, _, _ in replicas] == ["b"] * 10
    assert [predicted_s for _, predicted_s, _ in replicas] == pytest.approx([0.01 * (n + 1) for n in range(10)])


def test_a_replica_that_others_fill_gets_little_though_this_one_has_sent_it_less() -> None:
    """Three tries went to a replica on which another gateway had 50 requests, while one with a single one was free."""
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    assign(dispatcher, "r1", 64, 0.02)
    assign(dispatcher, "r2", 64, 0.02)
    dispatcher.report("r2", 50 * 0.02)
    assert [choose(dispatcher, budget_s=0.5) for _ in range(24)] == ["r1"] * 24
    assert dispatcher.sent_s("r2") == 0
    dispatcher.report("r2", 0.0)
    assert choose(dispatcher) == "r2"


def test_what_others_have_counts_in_full_in_predictions() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    assign(dispatcher, "a", 64, 0.1)
    dispatcher.report("a", 0.3)
    assert dispatcher.dispatch(1)[1] == pytest.approx(0.4)
    with pytest.raises(DeadlineError) as refusal:
        dispatcher.dispatch(1, budget_s=0.4)
    assert refusal.value.retry_after_s == pytest.approx(0.1)
    assert dispatcher.sent_s("a") == pytest.approx(0.1)


def test_a_report_of_almost_endless_work_is_taken_for_much() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    assign(dispatcher, "a", 64, 1e-6)
    dispatcher.report("a", 1e12)
    dispatcher.dispatch(1)
    dispatcher.dispatch(1)
    dispatcher.check_integrity()
    assert dispatcher.groups()[64]["a"] == pytest.approx(1000, rel=1e-3)


def test_a_dispatcher_uses_its_own_replicas_first() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    for name in "abcd":
        assign(dispatcher, name, 64, 0.1)
    dispatcher.prefer(["b", "d"])
    assert sorted(choose(dispatcher) for _ in range(2)) == ["b", "d"]
    assert sorted(choose(dispatcher) for _ in range(8)) == sorted("abcdabcd"), "a text more counts on another's"
    dispatcher.prefer(None)
    assert sorted(choose(dispatcher) for _ in range(2)) == ["a", "c"]


def test_shares_are_equal_in_each_level() -> None:
    held = {f"{max_length}-{number}": max_length for max_length in (64, 512) for number in range(6)}
    found = shares(held, ["y", "x", "z"])
    assert sorted(replica for own in found.values() for replica in own) == sorted(held)
    for own in found.values():
        assert Counter(held[replica] for replica in own) == {64: 2, 512: 2}
    assert found == shares(dict(reversed(held.items())), ["z", "y", "x"])


def test_an_avoided_replica_is_not_chosen_whatever_else_is_busy() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    load(dispatcher, "busy", 64, 0.1, outstanding=5)
    for name in ("busy", "idle"):
        assign(dispatcher, name, 64, 0.1)
    assign(dispatcher, "long", 512, 0.2)
    assert dispatcher.dispatch(1, avoid={"idle"})[0] == "long"
    assert dispatcher.dispatch(1, avoid={"idle", "long"})[0] == "busy"
    with pytest.raises(AllAvoidedError):
        dispatcher.dispatch(1, avoid={"idle", "long", "busy"})
    with pytest.raises(AllAvoidedError):
        dispatcher.dispatch(500, avoid={"long"})
    with pytest.raises(DeadlineError):
        dispatcher.dispatch(1, budget_s=0.1, avoid={"idle"})


@pytest.mark.parametrize("error", [NoRuntimeError(65, 64), DeadlineError(0.25, 0.1), DeadlineError(math.inf, 0.1)])
def test_errors_cross_processes(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize("arguments", [{"threshold": 0}, {"threshold": 1.1}, {"decay": 0}, {"decay": 1.1}, {"peek": 0}])
def test_bad_settings(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got"):
        Algorithm1(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slo_s must be positive"):
        Dispatcher(slo_s=0)


def resident(lengths: dict[int, float]) -> ResidentTimes:
    return ResidentTimes(tuple((length, ServiceCurve.constant(seconds)) for length, seconds in lengths.items()))


def test_a_text_runs_on_the_shortest_resident_runtime_that_it_fits_into() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    dispatcher.assign("a", 512, resident({64: 0.01, 128: 0.02, 512: 0.09}))
    for length, seconds in ((0, 0.01), (64, 0.01), (65, 0.02), (129, 0.09), (512, 0.09)):
        _, predicted_s, work = dispatcher.dispatch(length)
        assert predicted_s == pytest.approx(seconds)
        dispatcher.complete("a", work)


def test_a_resident_runtime_is_never_slower_than_a_longer_one() -> None:
    expected, idle, _ = resident({64: 0.03, 128: 0.02}).tables(128)
    assert set(expected) == set(idle) == {0.02}
    for wrong in ((), ((64, ServiceCurve.constant(0.1)),) * 2, ((0, ServiceCurve.constant(0.1)),)):
        with pytest.raises(ValueError, match="rise"):
            ResidentTimes(wrong)


def test_texts_stay_at_home_while_that_costs_little_and_spill_both_ways() -> None:
    """Of busy replicas, each group further from home counts as much as the shortest text takes, here 10 ms."""
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    times = resident({64: 0.01, 512: 0.08})
    for home in (64, 512):
        dispatcher.assign(str(home), 512, times, home)
    assert [choose(dispatcher, 64) for _ in range(5)] == ["64", "512", "64", "64", "512"]
    assert [choose(dispatcher, 512) for _ in range(2)] == ["512", "64"]
    assert dispatcher.groups() == {64: {"64": pytest.approx(0.11)}, 512: {"512": pytest.approx(0.1)}}


def test_an_avoided_head_leaves_the_rest_of_home_the_first_choice() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    for name in ("a", "b"):
        assign(dispatcher, name, 16, 0.01)
    dispatcher.assign("c", 64, resident({16: 0.01, 64: 0.04}), 64)
    assert [dispatcher.dispatch(1, avoid={"a"})[0] for _ in range(2)] == ["b", "b"]


def test_a_text_that_joins_a_batch_adds_less_than_it_takes_alone() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    dispatcher.assign("a", 64, ServiceCurve(((8, 0.1, 0.1), (64, 0.2, 0.2)), (0.25, 0.5)))
    found = [dispatcher.dispatch(8) for _ in range(3)]
    assert [predicted_s for _, predicted_s, _ in found] == pytest.approx([0.1, 0.125, 0.15])
    assert dispatcher.sent_s("a") == pytest.approx(0.075)
    with pytest.raises(DeadlineError):
        dispatcher.dispatch(64, budget_s=0.27)
    _, predicted_s, work = dispatcher.dispatch(64, budget_s=0.28)
    assert predicted_s == pytest.approx(0.275)
    dispatcher.check_integrity()
    for replica, _, added in [*found, ("a", 0.0, work)]:
        dispatcher.complete(replica, added)
    assert dispatcher.sent_s("a") == 0
    dispatcher.check_integrity()


def test_a_new_home_needs_no_other_runtimes() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    for name, home in (("a", 64), ("b", 512)):
        dispatcher.assign(name, 512, resident({64: 0.01, 512: 0.08}), home)
    assert choose(dispatcher, 64) == "a"
    for name, home in (("a", 512), ("b", 64)):
        dispatcher.assign(name, 512, resident({64: 0.01, 512: 0.08}), home)
    assert dispatcher.groups() == {64: {"b": 0.0}, 512: {"a": pytest.approx(0.01)}}
    with pytest.raises(ValueError, match="home"):
        dispatcher.assign("a", 64, resident({64: 0.01}), 128)


@pytest.mark.parametrize(("max_length", "service_s"), [(0, 0.1), (64, 0.0), (64, -0.1), (64, math.nan)])
def test_bad_assignments(max_length: int, service_s: float) -> None:
    dispatcher: Dispatcher[str] = Dispatcher(slo_s=1.0)
    with pytest.raises(ValueError, match="must be positive"):
        assign(dispatcher, "a", max_length, service_s)
    assert dispatcher.groups() == {}
