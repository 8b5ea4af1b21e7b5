"""The replica's side of a call: what it holds for whom, and what it says when its engine breaks down."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pliant.deployments.serving.errors import OutdatedPlannerError
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk, Obedience

pytestmark = pytest.mark.virtual_time


async def echo(query: float) -> float | Refusal:
    """Works for as many seconds as the query says; below none it breaks down, and above 100 it is too busy."""
    if query > 100:
        return Refusal("busy", "full")
    await asyncio.sleep(abs(query))
    if query < 0:
        raise ValueError(f"cannot do {query}")
    return query


def desk() -> Desk[float, float]:
    return Desk("the service", echo, weight=lambda query: 10 * query if query != 99.0 else [].pop())


async def replies(desk: Desk[float, float], *queries: float) -> list[list[tuple[int, float | Refusal]]]:
    return [part async for part in desk.several(Parcel("r", "here", queries))]


async def test_it_holds_what_each_gateway_sent_until_it_is_answered() -> None:
    served = desk()
    asked = [
        asyncio.create_task(served.one(Parcel("r", "here", (1.0,)))),
        asyncio.create_task(replies(served, 2.0, 3.0)),
        asyncio.create_task(served.one(Parcel("r", "there", (2.5,)))),
    ]
    held = []
    for _ in range(4):
        await asyncio.sleep(0.9)
        held.append(served.held.amounts())
    assert held == [{"here": 60.0, "there": 25.0}, {"here": 50.0, "there": 25.0}, {"here": 30.0}, {}]
    await asyncio.gather(*asked)


async def test_replies_come_as_they_are_made() -> None:
    assert await replies(desk(), 3.0, 1.0, 2.0) == [[(1, 1.0)], [(2, 2.0)], [(0, 3.0)]]


async def test_replies_that_are_made_together_come_together() -> None:
    parts = await replies(desk(), 1.0, 200.0, 300.0)
    assert [sorted(index for index, _ in part) for part in parts] == [[1, 2], [0]]


async def test_an_exception_is_a_refusal_and_only_of_its_own_query() -> None:
    served = desk()
    parts = await replies(served, 1.0, -1.0, 99.0, 2.0)
    found = dict(pair for part in parts for pair in part)
    assert (found[0], found[3]) == (1.0, 2.0)
    for index, reason in ((1, "ValueError: cannot do -1.0"), (2, "IndexError: pop from empty list")):
        assert found[index] == Refusal("failed", reason)
    assert served.held.amounts() == {}


async def test_three_that_break_down_in_a_row_are_too_many() -> None:
    served = desk()
    for query in (-0.1, -0.1, 0.1, -0.1, 200.0, -0.1):
        await served.one(Parcel("r", "here", (query,)))
        served.check()
    await served.one(Parcel("r", "here", (-0.1,)))
    with pytest.raises(RuntimeError, match=r"3 queries in a row.*cannot do -0.1"):
        served.check()


@pytest.mark.parametrize("queries", [(5.0,), (5.0, 6.0)])
async def test_what_is_cancelled_is_held_no_more_and_nothing_broke_down(queries: tuple[float, ...]) -> None:
    served = desk()
    for _ in range(3):
        task = asyncio.ensure_future(
            served.one(Parcel("r", "here", queries)) if len(queries) == 1 else replies(served, *queries)
        )
        await asyncio.sleep(1.0)
        assert served.held.amounts() == {"here": 10 * sum(queries)}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert served.held.amounts() == {}
        served.check()
    assert len(asyncio.all_tasks()) == 1


async def test_a_parcel_that_is_closed_drops_what_is_not_answered() -> None:
    served = desk()
    async with aclosing(served.several(Parcel("r", "here", (1.0, 5.0)))) as parts:
        assert await anext(parts) == [(0, 1.0)]
        assert served.held.amounts() == {"here": 50.0}
    await asyncio.sleep(0)
    assert served.held.amounts() == {}


async def test_a_replica_obeys_the_newest_planner_that_it_has_heard_of() -> None:
    obedience = Obedience()
    for epoch in (3, 3, 0, 5):
        obedience.check(epoch)
    with pytest.raises(OutdatedPlannerError):
        obedience.check(4)
    obedience.check(0)  # of a version that has no epochs
    obedience.check(5)
