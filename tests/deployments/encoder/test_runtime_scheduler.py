"""The planner of one service against replicas that load for real but compute nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from support.doubles import Bed, Sleepers, report

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.errand import TextWant
from pliant.deployments.encoder.lengths import Lengths
from pliant.deployments.encoder.messages import Answer, Assignment, Query, Report
from pliant.deployments.encoder.runtime_scheduler import RuntimeScheduler
from pliant.deployments.serving.errors import OutdatedPlannerError
from pliant.deployments.serving.messages import News
from pliant.deployments.serving.table import ReplicaTable

pytestmark = pytest.mark.virtual_time
LENGTHS = (4, 8, 16)

Table = ReplicaTable[Any, Report]


class Replicas:
    """Engines by name, and the calls that a scheduler makes to them."""

    def __init__(self, table: Table, room_mb: float | None) -> None:
        self.engines: dict[str, Engine] = {}
        self.sleepers: dict[str, Sleepers] = {}
        self.holds: list[Assignment] = []
        self.hangs: dict[str, asyncio.Event] = {}
        """Replicas that do as they are told once the event is set."""
        self._table = table
        self._room_mb = room_mb

    async def add(self, name: str, max_length: int, resident: bool = False) -> None:
        self.sleepers[name] = Sleepers(LENGTHS, service_s=0, per_token_s=0.001)
        self.sleepers[name].resident = resident
        if self._room_mb:
            self.sleepers[name].memory = Bed(self.sleepers[name], self._room_mb)
        self.engines[name] = Engine(self.sleepers[name])
        await self.engines[name].hold(max_length)
        self.spread()

    def remove(self, name: str) -> None:
        del self.engines[name]
        self.spread()

    def spread(self) -> None:
        """What Ray Serve does once a second."""
        self._table.sync({name: engine.report() for name, engine in self.engines.items()})

    def held(self) -> Counter[int]:
        return Counter(engine.report()["max_length"] for engine in self.engines.values())

    async def newest_first(self, oldest_first: Sequence[str]) -> Sequence[str]:
        return oldest_first[::-1]

    async def hold(self, assignment: Assignment) -> Report:
        self.holds.append(assignment)
        if assignment.replica in self.hangs:
            await self.hangs[assignment.replica].wait()
        return await self.engines[assignment.replica].hold(assignment.max_length, assignment.lengths)


class World:
    """A scheduler with its replicas, its clock, and what a gateway would have been told."""

    def __init__(self, resident: bool = False, room_mb: float | None = None, **options: Any) -> None:
        self.resident = resident
        self.now = 1000.0
        self.table: Table = ReplicaTable(EncoderChooser(1.0))
        self.replicas = Replicas(self.table, room_mb)
        keys = {"kind": "encoder", "model": "m", "replicas": 3, "slo_ms": 1000, **options}
        self.config = EncoderConfig.model_validate(keys)
        self.moving: list[frozenset[str]] = []
        self.scheduler = self.restarted()

    def restarted(self) -> RuntimeScheduler:
        return RuntimeScheduler(
            "topics",
            self.config,
            Lengths(LENGTHS, None, resident=self.resident),
            self.table,
            self.replicas,
            self.replicas.newest_first,
            self._changed,
            lambda: self.now,
        )

    def _changed(self) -> None:
        self.moving.append(self.scheduler.guidance().moving)

    async def run(self, seconds: int, *lengths: int) -> None:
        """Step once a second while texts of these lengths arrive, each ten times a second."""
        for _ in range(seconds):
            self.now += 1
            self.scheduler.hear(News(Counter(dict.fromkeys(lengths, 10)), answered=10 * len(lengths)))
            for _ in range(2):
                await self.scheduler.step()
                await asyncio.sleep(0.005)
            self.replicas.spread()


@pytest.fixture
async def world() -> World:
    world = World()
    for name, length in (("a", 16), ("b", 4), ("c", 8)):
        await world.replicas.add(name, length)
    return world


@pytest.fixture
async def roomy() -> World:
    """Whose replicas have room for any two runtimes each, which take a megabyte a token, and start with one."""
    world = World(residency="several", room_mb=24)
    for name, length in (("a", 16), ("b", 4), ("c", 8)):
        await world.replicas.add(name, length)
    return world


def sets(world: World) -> Counter[tuple[int, ...]]:
    return Counter(engine.report()["lengths"] for engine in world.replicas.engines.values())


async def test_replicas_with_room_for_two_hold_the_short_ones_that_arrive_and_the_longest(roomy: World) -> None:
    await roomy.run(30, 3)
    assert sets(roomy) == {(4, 16): 3}
    await roomy.run(60, 7)
    assert sets(roomy) == {(8, 16): 3}
    loaded = [[sleeper.max_length for sleeper in each.loaded] for each in roomy.replicas.sleepers.values()]
    once = [lengths[1:] if lengths[0] == lengths[1] else lengths for lengths in loaded]
    assert all(lengths.count(16) == 1 for lengths in once), "what is in both sets is not loaded again"
    assert once != loaded, "but the first was, to see what it takes by itself"


async def test_texts_of_the_longest_have_a_replica_while_sets_change(roomy: World) -> None:
    hold, holders = roomy.replicas.hold, []

    async def watched(assignment: Assignment) -> Report:
        others = [engine for name, engine in roomy.replicas.engines.items() if name != assignment.replica]
        holders.append(sum(16 in engine.lengths for engine in others))
        return await hold(assignment)

    roomy.replicas.hold = watched  # type: ignore[method-assign]
    await roomy.run(30, 3)
    await roomy.run(60, 7)
    assert len(holders) >= 6
    assert min(holders) >= 1


async def test_the_chooser_predicts_by_the_runtime_of_the_set_that_a_text_gets(roomy: World) -> None:
    await roomy.run(30, 3)
    seconds = {length: roomy.table.choose(TextWant(length, None, 1.0)).predicted_s or 0.0 for length in (3, 15)}
    assert seconds[15] > 2 * seconds[3]


async def test_a_set_of_which_one_cannot_be_loaded_leaves_the_replica_as_it_was(roomy: World) -> None:
    roomy.replicas.sleepers["c"].broken = {4}
    await roomy.run(60, 3)
    assert roomy.scheduler.guidance().plan["failed_moves"] == 1
    assert 4 not in roomy.replicas.engines["c"].lengths
    assert roomy.replicas.engines["c"].failure is None
    assert sets(roomy)[4, 16] == 2


async def test_without_demand_nothing_moves(world: World) -> None:
    await world.run(200)
    assert not world.replicas.holds
    assert world.scheduler.guidance().plan["moves"] == 0


async def test_replicas_follow_the_lengths_that_arrive(world: World) -> None:
    await world.run(15, 3)
    assert world.replicas.held() == {4: 2, 16: 1}
    facts = world.scheduler.guidance().plan
    assert (facts["version"], facts["reason"], facts["replicas"]) == (1, "start", {"4": 2, "8": 0, "16": 1})


async def test_a_shift_is_followed_at_once(world: World) -> None:
    await world.run(60, 3)
    await world.run(20, 15)
    assert world.replicas.held() == {16: 3}
    assert world.scheduler.guidance().plan["reason"] in ("shift", "period")


async def test_routing_stops_while_a_replica_moves_and_its_report_is_published(world: World) -> None:
    await world.run(14, 3)
    assert world.moving[-2:] == [frozenset({"c"}), frozenset()]
    guidance = world.scheduler.guidance()
    assert guidance.reports["c"]["max_length"] == 4
    assert world.table.reports()["c"]["max_length"] == 4


async def test_a_runtime_scheduler_that_starts_anew_goes_on_from_what_replicas_hold(world: World) -> None:
    await world.run(15, 3)
    moves = list(world.replicas.holds)
    world.scheduler = world.restarted()
    await world.run(8)
    await world.run(20, 3)
    assert world.replicas.holds == moves
    assert world.replicas.held() == {4: 2, 16: 1}


async def test_a_lost_replica_is_waited_for_and_then_planned_without(world: World) -> None:
    await world.run(15, 3)
    world.replicas.remove("b")
    await world.run(3, 3)
    assert world.scheduler.guidance().plan["version"] == 1
    await world.run(5, 3)
    assert world.scheduler.guidance().plan["reason"] == "replicas"
    assert world.replicas.held() == {4: 1, 16: 1}
    await world.replicas.add("d", 16)
    await world.run(3, 3)
    assert world.replicas.held() == {4: 2, 16: 1}


async def test_when_the_longest_is_lost_another_takes_it_at_once(world: World) -> None:
    await world.run(15, 3)
    world.replicas.remove("a")
    await world.run(1, 3)
    assert world.replicas.held() == {4: 1, 16: 1}


async def test_a_length_that_one_replica_cannot_load_goes_to_another(world: World) -> None:
    for name in ("a", "b", "c"):
        world.replicas.sleepers[name].broken = {4} if name == "c" else set()
    await world.run(60, 3)
    assert world.replicas.held()[16] == 1
    assert world.replicas.engines["c"].report()["max_length"] in (8, 16)
    assert world.scheduler.guidance().plan["failed_moves"] == 1
    answer = await world.replicas.engines["c"].infer(Query(b"\x01\x00\x00\x00", 1, None, 1.0))
    assert isinstance(answer, Answer)


async def test_a_length_that_none_can_load_is_planned_without() -> None:
    world = World()
    for name, length in (("a", 16), ("b", 8), ("c", 8)):
        await world.replicas.add(name, length)
        world.replicas.sleepers[name].broken = {4}
    await world.run(30, 3)
    plan = world.scheduler.guidance().plan
    assert plan["replicas"] == {"8": 2, "16": 1}
    assert plan["failed_moves"] <= 3


async def test_a_replica_that_vanishes_in_the_middle_of_a_move_is_no_disaster(world: World) -> None:
    async def lost(_assignment: Assignment) -> Report:
        await asyncio.sleep(0)
        raise ConnectionError("gone")

    world.replicas.hold = lost  # type: ignore[method-assign]
    await world.run(15, 3)
    assert world.scheduler.guidance().moving == frozenset()
    assert world.scheduler.guidance().plan["failed_moves"] >= 1


async def test_more_replicas_are_wanted_when_answers_come_late() -> None:
    world = World()
    world.config = world.config.model_copy(update={"replicas": world.config.replicas.model_copy(update={"max": 5})})
    world.scheduler = world.restarted()
    for name, length in (("a", 16), ("b", 4), ("c", 8)):
        await world.replicas.add(name, length)
    for _ in range(30):
        world.now += 1
        world.scheduler.hear(News(Counter({3: 50}), answered=50, near_slo=5, above_half=30))
        world.scheduler.wanted()
    assert world.scheduler.wanted() == 4


async def test_fewer_replicas_are_not_wanted_before_all_can_have_reported() -> None:
    world = World()
    assert world.scheduler.wanted() is None
    for name in "abcde":
        await world.replicas.add(name, 16)
    assert world.scheduler.wanted() is None
    world.now += 61
    assert world.scheduler.wanted() == 3


async def test_what_the_replica_holds_that_will_be_stopped_another_takes_over_first() -> None:
    world = World()
    for name, length in (("a", 4), ("b", 4), ("c", 16)):
        await world.replicas.add(name, length)
    await world.run(12, 3)
    assert world.replicas.held() == {4: 2, 16: 1}
    assert world.scheduler.ready_for(2) == 3, "what will be stopped, as it is the newest, alone holds the longest"
    holds, told = len(world.replicas.holds), []
    for _ in range(5):
        await world.run(1, 3, 15)
        told.append(world.scheduler.ready_for(2))
    assert told[-1] == 2
    assert sorted(world.replicas.engines[name].home for name in "ab") == [4, 16]
    assert [each.replica for each in world.replicas.holds[holds:]] != ["c"]
    world.replicas.remove("c")
    moves = len(world.replicas.holds)
    await world.run(12, 3, 15)
    assert len(world.replicas.holds) == moves, "nothing is left to be done"
    assert world.scheduler.ready_for(2) == 2


async def test_a_replica_that_cannot_take_over_does_not_keep_the_other_for_ever() -> None:
    world = World()
    for name, length in (("a", 4), ("b", 4), ("c", 16)):
        await world.replicas.add(name, length)
    await world.run(12, 3)
    world.replicas.hangs = {name: asyncio.Event() for name in "ab"}
    assert world.scheduler.ready_for(2) == 3
    await world.run(30, 3, 15)
    assert world.scheduler.ready_for(2) == 3
    await world.run(35, 3, 15)
    assert world.scheduler.ready_for(2) == 2


async def test_as_many_as_before_are_kept_if_they_are_wanted_again() -> None:
    world = World()
    for name, length in (("a", 4), ("b", 4), ("c", 16)):
        await world.replicas.add(name, length)
    await world.run(12, 3, 15)
    assert world.scheduler.ready_for(2) == 3
    await world.run(2, 3, 15)
    assert world.scheduler.ready_for(3) == 3
    await world.run(20, 3, 15)
    assert sum(world.scheduler.guidance().plan["replicas"].values()) == 3


async def test_a_service_that_sleeps_need_not_hand_over(world: World) -> None:
    assert world.scheduler.ready_for(0) == 0
    assert world.scheduler.ready_for(5) == 5


async def test_the_longest_is_covered_even_before_anything_arrived() -> None:
    world = World()
    for name in "abc":
        await world.replicas.add(name, 4)
    await world.run(4)
    assert world.replicas.held() == {4: 3}, "one with the longest may be starting"
    await world.run(5)
    assert world.replicas.held()[16] >= 1


async def test_quarantine_ends_and_grows(world: World) -> None:
    def failures() -> int:
        return int(world.scheduler.guidance().plan["failed_moves"])

    for name in ("a", "c"):
        world.replicas.sleepers[name].broken = {4}
    await world.run(30, 3)
    first = failures()
    assert 1 <= first <= 2
    await world.run(30, 3)
    assert failures() == first
    await world.run(60, 3)
    assert first < failures() <= 4
    for name in ("a", "c"):
        world.replicas.sleepers[name].broken = set()
    await world.run(240, 3)
    assert world.replicas.held() == {4: 2, 16: 1}


async def test_a_move_that_hangs_stops_neither_plans_nor_other_moves(world: World) -> None:
    await world.replicas.add("d", 8)
    world.replicas.hangs["c"] = resumed = asyncio.Event()
    async with asyncio.timeout(10):
        await world.run(15, 3)
        assert world.scheduler.guidance().moving == {"c"}
        assert world.scheduler.guidance().plan["replicas"] == {"4": 3, "8": 0, "16": 1}
        await world.run(15, 3)
        assert world.scheduler.guidance().moving == {"c"}
        assert world.scheduler.guidance().plan["replicas"] == {"4": 2, "8": 0, "16": 1}
        assert world.replicas.held() == {4: 2, 8: 1, 16: 1}
        resumed.set()
        await world.run(5, 3)
    assert world.scheduler.guidance().moving == frozenset()
    assert world.replicas.held() == {4: 3, 16: 1}
    assert world.scheduler.guidance().plan["failed_moves"] == 0


async def test_when_the_longest_hangs_in_a_move_another_takes_it(world: World) -> None:
    world.replicas.hangs["c"] = asyncio.Event()
    await world.run(15, 3)
    assert world.scheduler.guidance().moving == {"c"}
    world.replicas.remove("a")
    await world.run(15, 3)
    assert world.replicas.engines["b"].report()["max_length"] == 16


async def test_one_batch_of_moves_waits_for_another(world: World) -> None:
    await world.replicas.add("d", 8)
    world.replicas.hangs["c"] = resumed = asyncio.Event()
    await world.run(14, 3)
    assert [assignment.replica for assignment in world.replicas.holds] == ["c"]
    resumed.set()
    await world.run(2, 3)
    assert [assignment.replica for assignment in world.replicas.holds] == ["c", "d"]


async def test_a_move_that_never_ends_is_given_up_and_its_replica_chosen_again(world: World) -> None:
    world.replicas.hangs["c"] = asyncio.Event()
    await world.run(15, 3)
    assert world.scheduler.guidance().moving == {"c"}
    await asyncio.sleep(62)
    guidance = world.scheduler.guidance()
    assert guidance.moving == frozenset()
    assert guidance.plan["failed_moves"] == 1
    assert world.replicas.engines["c"].report()["max_length"] == 8


class Reporting:
    """Replicas whose runtimes take 10 ms whatever they hold, as on a GPU; nothing is computed."""

    def __init__(self, *held: int) -> None:
        self.reports = {f"r{number}": report(length) for number, length in enumerate(held)}
        self.moves: list[tuple[float, Assignment]] = []
        self.now = 0.0

    async def as_they_are(self, replicas: Sequence[str]) -> Sequence[str]:
        return replicas

    async def hold(self, assignment: Assignment) -> Report:
        self.moves.append((self.now, assignment))
        known = self.reports[assignment.replica]
        self.reports[assignment.replica] = report(assignment.max_length, known["version"] + 1)
        return self.reports[assignment.replica]


async def test_a_short_length_that_was_no_quicker_is_not_tried_again_every_ten_minutes() -> None:
    replicas = Reporting(16, 16, 16, 16)
    table: Table = ReplicaTable(EncoderChooser(1.0))
    config = EncoderConfig.model_validate({"kind": "encoder", "model": "m", "replicas": 4, "slo_ms": 1000})
    lengths = Lengths(LENGTHS, None)
    scheduler = RuntimeScheduler(
        "topics", config, lengths, table, replicas, replicas.as_they_are, lambda: None, lambda: replicas.now
    )
    while replicas.now < 1800:
        replicas.now += 1
        scheduler.hear(News(Counter({3: 50}), answered=50))
        table.sync(dict(replicas.reports))
        await scheduler.step()
        await asyncio.sleep(0)
    assert {assignment.max_length for _, assignment in replicas.moves} == {4, 16}, "it was hoped to be quicker once"
    assert max(when for when, _ in replicas.moves) < 60


async def test_where_replicas_take_all_lengths_only_their_homes_follow_the_texts() -> None:
    world = World(resident=True)
    for name, length in (("a", 16), ("b", 4), ("c", 8)):
        await world.replicas.add(name, 16, resident=True)
        await world.replicas.engines[name].hold(length)
    world.replicas.spread()
    await world.run(15, 3)
    assert world.replicas.held() == {16: 3}
    assert {engine.home for engine in world.replicas.engines.values()} == {4}
    assert all(len(sleepers.loaded) == 1 for sleepers in world.replicas.sleepers.values()), "nothing is loaded anew"
    assert not any(world.moving), "and routing goes on"
    plan = world.scheduler.guidance().plan
    assert plan["replicas"] == {"4": 3, "8": 0, "16": 0}
    assert plan["predicted_load"] >= plan["least_load"] > 0
    await world.run(40, 3, 15)
    assert {engine.home for engine in world.replicas.engines.values()} > {16}


async def test_a_scheduler_moves_nothing_any_more_once_a_newer_planner_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(assignment: Assignment) -> Report:
        world.replicas.holds.append(assignment)
        raise OutdatedPlannerError("another planner has taken over")

    monkeypatch.setattr(world.replicas, "hold", refused)
    await world.run(130, 16)
    assert world.scheduler.outdated
    asked = len(world.replicas.holds)
    assert asked
    await world.run(130, 4)
    assert len(world.replicas.holds) == asked
    assert world.scheduler.guidance().plan["failed_moves"] == 0
