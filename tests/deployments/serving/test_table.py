"""Which replicas one gateway may choose now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.scripted_replicas import CountingChooser, report

from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.parcels import Report
from pliant.deployments.serving.table import Choice, Feed, NoReplicaError, ReplicaTable, feed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A table of replicas that run, each of which reported."""

    def __init__(self, *replicas: str) -> None:
        self.clock = Clock()
        self.chooser = CountingChooser()
        self.table: ReplicaTable[Any, Report] = ReplicaTable(self.chooser, self.clock)
        self.table.sync({replica: report() for replica in replicas})

    def usable(self) -> set[str]:
        """Asks for a choice first, as it is then that replicas are let in again."""
        try:
            self.table.done(self.table.choose("x"))
        except NoReplicaError:
            assert not self.chooser.may
        assert self.table.ready == bool(self.chooser.may)
        assert all(self.table.usable(replica) for replica in self.chooser.may)
        return set(self.chooser.may)

    def fail(self, replica: str, times: int = 3) -> None:
        for _ in range(times):
            self.table.failed(replica)


def test_replicas_that_run_and_reported_may_be_chosen() -> None:
    scene = Scene("a", "b")
    assert scene.usable() == {"a", "b"}
    scene.table.sync({"b": report(), "c": None})
    assert scene.usable() == {"b"}
    assert scene.table.running == 1
    assert scene.table.runs_another({"c"})
    assert not scene.table.runs_another({"b", "c"})
    scene.table.sync({"b": report(), "c": report()})
    assert scene.usable() == {"b", "c"}
    scene.table.sync({})
    assert scene.usable() == set()
    assert scene.table.reports() == {}


def test_reports_are_taken_over_in_order() -> None:
    scene = Scene("a")
    for version, held, known in ((3, 3.0, 3.0), (2, 2.0, 3.0), (3, 4.0, 4.0), (4, 1.0, 1.0)):
        scene.table.observe("a", report(version, other=held))
        assert scene.chooser.may["a"] == known
    scene.table.sync({"a": report(2, other=9.0)})
    assert scene.table.reports()["a"]["version"] == 4


def test_what_this_gateway_has_there_is_not_what_others_have() -> None:
    scene = Scene("a")
    scene.table.observe("a", report(2, other=3.0, third=4.0, **{scene.table.gateway: 5.0}))
    assert scene.chooser.may["a"] == 7.0


def test_a_replica_that_died_does_not_come_back_while_it_is_still_listed() -> None:
    scene = Scene("a", "b")
    scene.table.lose("a")
    assert scene.usable() == {"b"}
    scene.table.sync({"a": report(5), "b": report()})
    scene.table.observe("a", report(6))
    assert scene.usable() == {"b"}
    scene.table.sync({"b": report()})
    scene.table.sync({"a": report(), "b": report()})
    assert scene.usable() == {"a", "b"}


def test_a_suspect_is_not_chosen_until_it_is_trusted() -> None:
    scene = Scene("a", "b")
    scene.table.suspect("a")
    scene.table.observe("a", report(2))
    assert scene.usable() == {"b"}
    assert set(scene.table.reports()) == {"a", "b"}
    scene.table.trust("a")
    assert scene.usable() == {"a", "b"}


def test_what_is_said_of_replicas_that_left_changes_nothing() -> None:
    scene = Scene("a", "b")
    scene.table.suspect("a")
    scene.table.lose("a")
    scene.chooser.suspend = pytest.fail  # type: ignore[method-assign, assignment]
    scene.table.trust("a")
    scene.table.suspect("unknown")
    scene.table.trust("unknown")
    scene.table.stop_routing(["a", "unknown"])
    scene.table.stop_routing([])
    scene.fail("a")
    scene.table.answered("a")
    scene.table.observe("a", report(9))
    assert scene.usable() == {"b"}


def test_replicas_that_move_are_not_chosen() -> None:
    scene = Scene("a", "b", "c")
    scene.table.stop_routing(["a", "d"])
    assert scene.usable() == {"b", "c"}
    scene.table.stop_routing(["b"])
    assert scene.usable() == {"a", "c"}
    scene.table.sync({"a": report(), "b": report(2), "c": report()})
    assert scene.usable() == {"a", "c"}
    scene.table.stop_routing([])
    assert scene.usable() == {"a", "b", "c"}


def test_a_replica_that_is_to_move_before_it_is_known() -> None:
    scene = Scene("a")
    scene.table.stop_routing(["b"])
    scene.table.sync({"a": report(), "b": report()})
    assert scene.usable() == {"a"}


def test_failures_in_a_row_eject_for_ever_longer() -> None:
    scene = Scene("a", "b")
    scene.fail("a", 2)
    assert scene.usable() == {"a", "b"}
    scene.fail("a", 1)
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        assert scene.usable() == {"b"}
        assert scene.table.replicas()["a"]["ejected"]
        scene.clock.now += pause_s - 0.01
        assert scene.usable() == {"b"}
        scene.clock.now += 0.02
        assert scene.usable() == {"a", "b"}
        scene.fail("a", 1)


def test_who_looks_finds_that_one_is_let_in_again_though_nobody_asks_for_anything() -> None:
    scene = Scene("a", "b")
    scene.fail("a")
    assert scene.table.replicas()["a"]["ejected"]
    scene.clock.now += 1.01
    assert not scene.table.replicas()["a"]["ejected"]


def test_failures_of_one_that_is_ejected_change_nothing() -> None:
    scene = Scene("a", "b")
    scene.fail("a", 30)
    scene.clock.now = 1.01
    assert scene.usable() == {"a", "b"}


def test_an_answer_makes_up_for_failures() -> None:
    scene = Scene("a", "b")
    for _ in range(3):
        scene.fail("a", 2)
        scene.table.answered("a")
    assert scene.usable() == {"a", "b"}
    scene.fail("a")
    assert scene.usable() == {"b"}
    scene.table.answered("a")  # though it is late
    assert scene.usable() == {"a", "b"}
    scene.fail("a")
    scene.clock.now += 1.01  # as the first time
    assert scene.usable() == {"a", "b"}


def test_the_last_that_may_be_chosen_is_not_ejected() -> None:
    scene = Scene("a", "b")
    scene.fail("a", 9)
    scene.fail("b", 9)
    assert scene.usable() == {"b"}


@pytest.mark.parametrize("end", ["lose", "suspect", "leave", "move"])
def test_those_that_are_ejected_are_let_in_when_there_is_no_other(end: str) -> None:
    scene = Scene("a", "b")
    scene.fail("a")
    match end:
        case "lose":
            scene.table.lose("b")
        case "suspect":
            scene.table.suspect("b")
        case "leave":
            scene.table.sync({"a": report()})
        case "move":
            scene.table.stop_routing(["b"])
    assert scene.table.ready
    assert scene.usable() == {"a"}


def test_those_that_are_ejected_are_let_in_for_what_all_others_failed() -> None:
    scene = Scene("a", "b", "c", "d")
    scene.fail("a")
    scene.fail("b")
    scene.table.let_in({"c"})
    assert scene.usable() == {"c", "d"}
    scene.table.let_in({"b", "c", "d"})
    assert scene.usable() == {"a", "c", "d"}
    scene.fail("a", 1)
    scene.clock.now = 1.5
    assert scene.usable() == {"b", "c", "d"}, "a is out for twice as long"


def test_one_that_is_ejected_stays_so_whatever_it_reports() -> None:
    scene = Scene("a", "b")
    scene.fail("a")
    scene.table.observe("a", report(2))
    scene.table.stop_routing(["a"])
    scene.table.stop_routing([])
    assert scene.usable() == {"b"}


def test_a_new_replica_of_the_same_name_is_as_good_as_any() -> None:
    scene = Scene("a", "b")
    scene.fail("a")
    scene.table.sync({"b": report()})
    scene.table.sync({"a": report(), "b": report()})
    assert scene.usable() == {"a", "b"}


def test_choices_are_the_choosers() -> None:
    scene = Scene("a", "b")
    assert scene.table.choose("x") == Choice("a", scene.chooser.predicted_s, "x")
    assert scene.table.choose("y").replica == "b"
    last = scene.table.choose("z", {"a"})
    assert last.replica == "b"
    assert scene.table.replicas()["b"]["outstanding"] == 2
    scene.table.done(last)
    assert scene.table.replicas()["b"]["outstanding"] == 1
    with pytest.raises(NoReplicaError):
        scene.table.choose("x", {"a", "b"})
    scene.chooser.sheds = RequestError(Outcome.SHED, "full")
    with pytest.raises(RequestError):
        scene.table.choose("x")


@pytest.mark.virtual_time
async def test_a_feed_tells_the_table_that_follows_it_what_it_knows() -> None:
    heard = Feed()

    async def answers(_replica: str) -> None:
        await asyncio.sleep(0.1)

    heard.probe_with(answers)
    heard.sync({"a": report(), "b": report()})
    heard.suspect("a")
    scene = Scene()
    heard.follow(scene.table)
    assert scene.usable() == {"a", "b"}
    heard.suspect("a")
    assert scene.usable() == {"b"}
    await asyncio.sleep(0.2)
    assert scene.usable() == {"a", "b"}
    heard.lose("a")
    assert scene.usable() == {"b"}
    heard.sync({"c": report()})
    assert scene.usable() == {"c"}


def test_router_and_gateway_meet() -> None:
    assert feed("one of these tests") is feed("one of these tests")
    assert feed("one of these tests") is not feed("another")
