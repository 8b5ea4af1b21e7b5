"""Whether replicas that let requests wait still run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from support.scripted_replicas import CountingChooser, report

from pliant.deployments.serving.parcels import Report
from pliant.deployments.serving.table import ReplicaTable

pytestmark = pytest.mark.virtual_time


def known(probe: Callable[[str], Awaitable[None]]) -> ReplicaTable[str, Report]:
    table: ReplicaTable[str, Report] = ReplicaTable(CountingChooser())
    table.probe_with(probe)
    table.sync({"a": report(), "b": report()})
    return table


async def test_one_call_at_a_time_and_one_a_second() -> None:
    called: list[float] = []

    async def answers(_replica: str) -> None:
        called.append(time.monotonic())

    table = known(answers)
    for _ in range(300):
        table.doubt("a")
        await asyncio.sleep(0.01)
        assert table.usable("a")
    assert len(called) == 3


@pytest.mark.parametrize("error", [ConnectionError("nobody is there"), asyncio.CancelledError()])
async def test_one_that_cannot_be_reached_is_called_until_it_can(error: BaseException) -> None:
    left = [error, error]

    async def answers(_replica: str) -> None:
        if left:
            raise left.pop()

    table = known(answers)
    table.doubt("a")
    await asyncio.sleep(0.5)
    assert table.suspected("a")
    assert not table.usable("a")
    assert table.usable("b")
    await asyncio.sleep(2.0)
    assert not left
    assert table.usable("a")


async def test_an_answer_that_is_late_counts_and_a_call_that_is_lost_is_made_again() -> None:
    calls: list[asyncio.Event] = []

    async def answers(_replica: str) -> None:
        calls.append(asyncio.Event())
        await calls[-1].wait()

    table = known(answers)
    table.doubt("a")
    await asyncio.sleep(1.9)
    assert table.usable("a")
    await asyncio.sleep(0.2)
    assert not table.usable("a")
    await asyncio.sleep(12.0)
    assert len(calls) == 2
    calls[1].set()
    await asyncio.sleep(0.1)
    assert table.usable("a")


async def test_what_cannot_be_reached_while_it_was_called_just_now_is_called_again() -> None:
    async def answers(_replica: str) -> None: ...

    table = known(answers)
    table.doubt("a")
    await asyncio.sleep(0.1)
    table.suspect("a")
    table.doubt("a")
    assert not table.usable("a")
    await asyncio.sleep(1.1)
    assert table.usable("a")


async def test_nobody_calls_what_is_gone() -> None:
    async def stopped(_replica: str) -> None:
        await asyncio.Event().wait()

    table, before = known(stopped), asyncio.all_tasks()
    table.doubt("a")
    await asyncio.sleep(5.0)
    table.lose("a")
    table.doubt("a")
    await asyncio.sleep(0.1)
    assert asyncio.all_tasks() == before
    assert not table.suspected("a")
