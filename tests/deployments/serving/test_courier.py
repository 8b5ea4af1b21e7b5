"""What travels together, and what becomes of each reply when only some come, or only some are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from typing import Any

import pytest
from support.scripted_replicas import ANSWERS, Act, ScriptedReplicas, slow

from pliant.deployments.serving.courier import MOST, Courier
from pliant.deployments.serving.errors import ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.logs import work_on
from pliant.deployments.serving.parcels import Parcel, Refusal

pytestmark = pytest.mark.virtual_time


def couriers(**scripts: list[Act]) -> tuple[Courier[Any, Any], ScriptedReplicas]:
    replicas = ScriptedReplicas(scripts)
    return Courier("here", replicas), replicas


async def test_one_call_per_replica_and_turn() -> None:
    courier, replicas = couriers(a=[ANSWERS], b=[ANSWERS])
    replies = [courier.send("ab"[index % 2], index) for index in range(10)]
    await asyncio.sleep(0)
    replies.append(courier.send("a", 10))
    assert await asyncio.gather(*replies) == list(range(11))
    assert replicas.parcels == [
        Parcel("a", "here", (0, 2, 4, 6, 8)),
        Parcel("b", "here", (1, 3, 5, 7, 9)),
        Parcel("a", "here", (10,)),
    ]


async def test_what_tasks_of_one_turn_send_travels_together() -> None:
    courier, replicas = couriers(a=[ANSWERS])

    async def ask(query: int) -> Any:
        return await courier.send("a", query)

    assert await asyncio.gather(*map(ask, range(64))) == list(range(64))
    assert len(replicas.parcels) == 1


@pytest.mark.parametrize("queries", [MOST, MOST + 1, 3 * MOST - 1])
async def test_a_parcel_has_an_end(queries: int) -> None:
    courier, replicas = couriers(a=[ANSWERS])
    assert await asyncio.gather(*[courier.send("a", index) for index in range(queries)]) == list(range(queries))
    assert [query for parcel in replicas.parcels for query in parcel.queries] == list(range(queries))
    assert all(len(parcel.queries) <= MOST for parcel in replicas.parcels)
    assert len(replicas.parcels) == -(-queries // MOST)


async def test_nobody_waits_for_the_slowest() -> None:
    courier, _ = couriers(a=[slow(1.0), slow(0.1), slow(0.5)])
    loop = asyncio.get_running_loop()
    times: dict[int, float] = {}

    async def ask(index: int) -> None:
        await courier.send("a", index)
        times[index] = loop.time()

    await asyncio.gather(*map(ask, range(3)))
    assert times == pytest.approx({1: 0.1, 2: 0.5, 0: 1.0}, abs=0.01)


async def test_what_is_no_longer_wanted_is_not_sent() -> None:
    courier, replicas = couriers(a=[ANSWERS], b=[ANSWERS])
    gone, wanted, alone = courier.send("a", 0), courier.send("a", 1), courier.send("b", 2)
    gone.cancel()
    alone.cancel()
    assert await wanted == 1
    assert replicas.parcels == [Parcel("a", "here", (1,))]


async def test_one_that_is_cancelled_lets_the_others_be_answered() -> None:
    courier, replicas = couriers(a=[slow(1.0), slow(1.0), slow(1.0)])
    replies = [courier.send("a", index) for index in range(3)]
    await asyncio.sleep(0.5)
    replies[1].cancel()
    assert [await replies[0], await replies[2]] == [0, 2]
    assert not replicas.cancelled


@pytest.mark.parametrize("queries", [1, 3])
async def test_when_all_are_cancelled_the_replica_stops(queries: int) -> None:
    courier, replicas = couriers(a=[slow(1.0)])
    replies = [courier.send("a", index) for index in range(queries)]
    await asyncio.sleep(0.5)
    for reply in replies:
        reply.cancel()
    await asyncio.sleep(0.01)
    assert not +replicas.working
    assert replicas.cancelled == {"a": queries}


async def test_the_replica_stops_once_only_what_was_cancelled_is_left() -> None:
    courier, replicas = couriers(a=[slow(10.0), slow(0.1)])
    gone, wanted = courier.send("a", 0), courier.send("a", 1)
    await asyncio.sleep(0.05)
    gone.cancel()
    assert await wanted == 1
    await asyncio.sleep(0.01)
    assert not +replicas.working


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("error", [ReplicaLostError("died"), ReplicaLeftError("left"), ValueError("odd")])
async def test_what_a_transport_raises_each_sender_hears(queries: int, error: Exception) -> None:
    courier, _ = couriers(a=[Act(error=error)])
    found = await asyncio.gather(*[courier.send("a", index) for index in range(queries)], return_exceptions=True)
    assert found == [error] * queries


async def test_what_was_answered_stays_so_when_the_rest_is_lost() -> None:
    courier, replicas = couriers(a=[slow(0.1), slow(1.0), slow(0.2)])
    asyncio.get_running_loop().call_later(0.5, replicas.kill, "a")
    first, lost, second = await asyncio.gather(
        *[courier.send("a", index) for index in range(3)], return_exceptions=True
    )
    assert (first, second) == (0, 2)
    assert isinstance(lost, ReplicaLostError)


class Forgetful:
    """Ends a parcel before all is answered."""

    async def one(self, parcel: Parcel[int]) -> int:
        raise AssertionError

    async def several(self, parcel: Parcel[int]) -> AsyncGenerator[Sequence[tuple[int, int]], None]:
        yield [(0, parcel.queries[0])]


async def test_what_is_not_answered_failed() -> None:
    courier: Courier[int, int] = Courier("here", Forgetful())
    answer, nothing = await asyncio.gather(courier.send("a", 7), courier.send("a", 8))
    assert answer == 7
    assert isinstance(nothing, Refusal)
    assert nothing.cause == "failed"


async def test_each_query_says_its_request_and_none_leaves_in_the_context_of_one() -> None:
    client: ContextVar[str] = ContextVar("client", default="nobody")
    seen: list[str] = []

    class Seeing(ScriptedReplicas):
        async def one(self, parcel: Parcel[Any]) -> Any:
            seen.append(client.get())
            return await super().one(parcel)

    replicas = Seeing({"a": [ANSWERS], "b": [ANSWERS]})
    courier: Courier[Any, Any] = Courier("here", replicas)

    async def ask(request: str, replica: str) -> Any:
        client.set(request)
        work_on(request)
        return await courier.send(replica, request)

    await asyncio.gather(ask("x", "a"), ask("y", "a"), ask("z", "b"))
    assert [parcel.requests for parcel in replicas.parcels] == [("x", "y"), ("z",)]
    assert seen == ["nobody"], "Serve ends the calls of a request whose client leaves"
