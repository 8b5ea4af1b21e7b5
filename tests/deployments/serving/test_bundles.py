"""Streams that travel together: each is whole and in order, and ends when it should, whatever becomes of others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar

import pytest

from pliant.deployments.serving.bundles import Bundle, BundledStreams, Outboxes, Sending, UnfetchedError
from pliant.deployments.serving.errors import ReplicaLostError
from pliant.deployments.serving.parcels import Parcel

pytestmark = pytest.mark.virtual_time


class Replica:
    """Its streams are the numbers up to a query's; all of them have the next one every second, or at random times."""

    def __init__(self, seed: int | None = None) -> None:
        self.outboxes: Outboxes[int] = Outboxes()
        self.bundles: list[int] = []
        """How many items each had."""
        self.channels = 0
        self.live = 0
        self.cut = asyncio.Event()
        self._random = None if seed is None else random.Random(seed)

    async def numbers(self, most: int) -> AsyncGenerator[int, None]:
        self.live += 1
        try:
            for number in range(most):
                await asyncio.sleep(self._random.expovariate(1) if self._random else 1)
                yield number
        finally:
            self.live -= 1

    async def send(self, parcel: Parcel[Sending[int]]) -> int:
        [sending] = parcel.queries
        if self._random:
            await asyncio.sleep(self._random.random())
        return await self.outboxes.send(sending, self.numbers(sending.query))

    async def fetch(self, parcel: Parcel[str]) -> AsyncGenerator[Bundle[int], None]:
        self.channels += 1
        async with aclosing(self.outboxes.bundles(parcel.queries[0])) as bundles:
            async for bundle in bundles:
                if self.cut.is_set():
                    raise ReplicaLostError("it died")
                self.bundles.append(len(bundle))
                yield bundle

    def empty(self) -> bool:
        return not (self.outboxes._outboxes or self.live)


def streams(replica: Replica) -> BundledStreams[int, int]:
    return BundledStreams(replica.send, replica.fetch)


async def whole(bundled: BundledStreams[int, int], most: int) -> list[int]:
    return [item async for item in bundled.items(Parcel("r", "g", (most,)))]


async def test_what_comes_at_a_time_travels_in_one_bundle() -> None:
    replica = Replica()
    bundled = streams(replica)
    answers = await asyncio.gather(*(whole(bundled, 10) for _ in range(50)))
    assert answers == [list(range(10))] * 50
    assert replica.bundles == [50] * 10
    assert replica.channels == 1


@pytest.mark.parametrize("seed", range(20))
async def test_streams_are_whole_and_in_order_however_they_come_and_go(seed: int) -> None:
    replica, chance = Replica(seed), random.Random(seed)
    bundled = streams(replica)

    async def ask() -> None:
        await asyncio.sleep(chance.uniform(0, 60))
        most, wanted = chance.randrange(12), chance.randrange(12)
        got = []
        async with aclosing(bundled.items(Parcel("r", "g", (most,)))) as items:
            async for item in items:
                if len(got) == wanted:
                    break
                got.append(item)
                await asyncio.sleep(chance.choice((0, 0, 3)))
        assert got == list(range(min(most, wanted)))

    await asyncio.gather(*(ask() for _ in range(40)))
    await asyncio.sleep(100)
    assert replica.empty()
    assert not bundled._channels


async def test_a_channel_is_opened_anew_after_it_was_closed() -> None:
    replica = Replica()
    bundled = streams(replica)
    for wait_s in (0.5, 0.999, 1.0, 1.001, 5.0):
        assert await whole(bundled, 2) == [0, 1]
        await asyncio.sleep(wait_s)
    assert 2 <= replica.channels <= 5


async def test_streams_break_with_their_channel_and_the_next_has_another() -> None:
    replica = Replica()
    bundled = streams(replica)
    asked = [asyncio.create_task(whole(bundled, 100)) for _ in range(3)]
    await asyncio.sleep(5.5)
    replica.cut.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(error) for error in found] == ["it died"] * 3
    replica.cut.clear()
    assert await whole(bundled, 3) == [0, 1, 2]
    assert replica.channels == 2
    assert replica.live == 0


async def test_a_channel_is_in_nobodys_context() -> None:
    client: ContextVar[str] = ContextVar("client", default="nobody")
    found: list[str] = []
    replica = Replica()

    def fetch(parcel: Parcel[str]) -> AsyncGenerator[Bundle[int], None]:
        found.append(client.get())
        return replica.fetch(parcel)

    client.set("the first one")
    assert await whole(BundledStreams(replica.send, fetch), 2) == [0, 1]
    assert found == ["nobody"], "Serve ends the calls of a context when its client leaves"


async def test_a_stream_that_cannot_be_sent_raises_why() -> None:
    async def send(parcel: Parcel[Sending[int]]) -> int:
        raise ReplicaLostError("it broke")

    replica = Replica()
    with pytest.raises(ReplicaLostError, match="it broke"):
        await whole(BundledStreams(send, replica.fetch), 3)
    await asyncio.sleep(5)
    assert replica.empty()


async def test_what_nobody_fetches_ends_within_half_a_minute() -> None:
    replica = Replica()
    sent = asyncio.create_task(replica.send(Parcel("r", "g", (Sending("channel", 0, 5),))))
    await asyncio.sleep(32)
    with pytest.raises(UnfetchedError):
        await sent
    assert replica.empty()


async def test_a_gateway_that_is_slow_gets_no_more_than_one_item_of_a_stream_at_a_time() -> None:
    outboxes: Outboxes[int] = Outboxes()
    made: list[int] = []

    async def numbers() -> AsyncGenerator[int, None]:
        for number in range(5):
            made.append(number)
            yield number

    sending = asyncio.create_task(outboxes.send(Sending("channel", 7, None), numbers()))
    async with aclosing(outboxes.bundles("channel")) as bundles:
        for number in range(5):
            await asyncio.sleep(10)
            assert made == list(range(number + 1))
            assert await anext(bundles) == [(7, number)]
    assert await sending == 5
