"""A replica answers uncompiled at once, and takes over each compiled runtime as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from support.doubles import Sleepers

from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.messages import Answer, Query
from pliant.deployments.encoder.upgrades import Upgrades
from pliant.errors import CannotCompileError


def query(length: int) -> Query:
    return Query(np.ones(length, dtype="<i4").tobytes(), length, None, 1.0)


@pytest.fixture
def sleepers() -> Sleepers:
    made = Sleepers((4, 8, 16), service_s=0.0)
    made.uncompiled = {4, 8, 16}
    return made


async def settled(engine: Engine) -> None:
    while True:
        await asyncio.sleep(0.001)
        if not engine.report()["compiling"]:
            return


async def test_what_is_held_comes_first_and_is_swapped_under_load(sleepers: Sleepers) -> None:
    engine = Engine(sleepers)
    await engine.hold(8)
    assert engine.report()["backend"] == "eager"
    upgrades = Upgrades("topics", engine, sleepers)
    assert engine.report()["compiling"] == [4, 8, 16], "known before the replica is"
    running = asyncio.create_task(upgrades.run())
    answers = [await engine.infer(query(3)) for _ in range(20)]
    await settled(engine)
    running.cancel()
    assert all(isinstance(answer, Answer) for answer in answers)
    assert sleepers.compiled[0] == 8
    assert sorted(sleepers.compiled) == [4, 8, 16]
    report = engine.report()
    assert (report["backend"], report["max_length"], report["uncompiled"]) == ("sleeper", 8, {})


async def test_what_is_used_most_comes_before_what_is_not(sleepers: Sleepers) -> None:
    engine = Engine(sleepers)
    for length, answers in ((16, 5), (4, 2), (8, 0)):
        await engine.hold(length)
        for _ in range(answers):
            await engine.infer(query(3))
    running = asyncio.create_task(Upgrades("topics", engine, sleepers).run())
    await settled(engine)
    running.cancel()
    assert sleepers.compiled == [16, 4, 8]


async def test_others_are_told_how_urgent_it_is_now(sleepers: Sleepers) -> None:
    told: list[Callable[[], float]] = []
    compile_one = sleepers.compile
    sleepers.compile = lambda length, urgency: (told.append(urgency), compile_one(length, urgency))[1]  # type: ignore[method-assign]
    engine = Engine(sleepers)
    await engine.hold(16)
    running = asyncio.create_task(Upgrades("topics", engine, sleepers).run())
    await settled(engine)
    before = told[0]()
    await engine.infer(query(9))
    running.cancel()
    assert told[0]() < before


async def test_without_a_compiler_it_stays_uncompiled_and_says_so_once(
    sleepers: Sleepers, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(_length: int, _urgency: object) -> None:
        raise CannotCompileError("no compiler")

    sleepers.compile = no_compiler  # type: ignore[method-assign]
    engine = Engine(sleepers)
    await engine.hold(8)
    upgrades = Upgrades("topics", engine, sleepers)
    running = asyncio.create_task(upgrades.run())
    await settled(engine)
    upgrades.look()
    await settled(engine)
    running.cancel()
    report = engine.report()
    assert (report["backend"], report["uncompiled"]) == ("eager", dict.fromkeys((4, 8, 16), "no compiler"))
    assert [record.message for record in caplog.records] == ["topics: no compiler"]


async def test_a_length_that_is_held_later_is_compiled_too(sleepers: Sleepers) -> None:
    sleepers.uncompiled = {4}
    engine = Engine(sleepers)
    await engine.hold(4)
    upgrades = Upgrades("topics", engine, sleepers)
    running = asyncio.create_task(upgrades.run())
    await settled(engine)
    sleepers.uncompiled = {12}
    await engine.hold(12)
    upgrades.look()
    await settled(engine)
    running.cancel()
    assert sleepers.compiled == [4, 12]
    assert engine.report()["backend"] == "sleeper"


async def test_one_that_fails_does_not_hold_up_the_others(sleepers: Sleepers) -> None:
    sleepers.uncompilable = {8}
    engine = Engine(sleepers)
    await engine.hold(8)
    running = asyncio.create_task(Upgrades("topics", engine, sleepers).run())
    await settled(engine)
    running.cancel()
    assert sleepers.uncompiled == {8}
    assert engine.report()["backend"] == "eager"
    assert engine.report()["uncompiled"] == {8: "no compiler for 8"}


async def test_what_is_taken_for_granted_comes_before_what_is_measured(sleepers: Sleepers) -> None:
    """A runtime for all lengths, which stays until another one has turned out to be faster."""
    sleepers.resident, sleepers.uncompiled = True, {16}
    engine = Engine(sleepers)
    await engine.hold(4)
    seen: list[tuple[str, list[int]]] = []

    def settle_lengths() -> None:
        seen.append((engine.report()["backend"], engine.report()["compiling"]))
        sleepers.uncompiled = {8}

    sleepers.settle_lengths = settle_lengths  # type: ignore[method-assign]
    running = asyncio.create_task(Upgrades("topics", engine, sleepers).run())
    await settled(engine)
    running.cancel()
    assert sleepers.compiled == [16, 8]
    assert seen == [("sleeper", [4, 8, 16])], "people see that it may change"
    assert engine.home == 4
