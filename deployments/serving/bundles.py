"""Streams of one gateway from one replica, bundled: what all of them have to say at a time travels in one message.

To carry a message costs both processes far more than what is in it, and a step of a language model has a piece for each
of hundreds of answers. So a stream is a call that only ends when its last item was fetched, and how many there were is
what it returns. The items of all streams are fetched by one call, their *channel*, which is opened for the first of
them and lasts a little longer than the last. When a channel breaks, so do its streams, and another channel is opened
for the next.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import Context
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.parcels import Parcel
from pliant.message import message

Query = TypeVar("Query")
Item = TypeVar("Item")
Bundle = Sequence[tuple[int, Item]]
"""Items, each with the key of its stream, and of each stream one at most."""

_LINGER_S = 1.0
"""How long a channel stays open that nobody sends to."""
_FETCHED_WITHIN_S = 30.0
"""Or the gateway has gone."""


@message
class Sending(NamedTuple, Generic[Query]):
    """A query whose stream is to be fetched."""

    channel: str
    key: int
    """Names the stream within its channel."""
    query: Query


class UnfetchedError(Exception):
    """Nobody fetches what a stream has to say."""


class _Outbox(Generic[Item]):
    """The items of one channel that are to be fetched."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[Item, asyncio.Future[None]]] = {}
        """By key; and what is to be done when it was fetched."""
        self.filled = asyncio.Event()
        self.streams = 0
        self.open = False
        """Whether somebody fetches."""

    async def put(self, key: int, item: Item) -> None:
        """Returns once it was fetched. Raises UnfetchedError."""
        fetched = asyncio.get_running_loop().create_future()
        self.items[key] = item, fetched
        self.filled.set()
        try:
            async with asyncio.timeout(_FETCHED_WITHIN_S):
                await fetched
        except TimeoutError:
            raise UnfetchedError(f"nobody fetched it in {_FETCHED_WITHIN_S:g} s") from None
        finally:
            self.items.pop(key, None)

    def taken(self) -> Bundle[Item]:
        """All of them."""
        items, self.items = self.items, {}
        self.filled.clear()
        for _, fetched in items.values():
            if not fetched.done():
                fetched.set_result(None)
        return [(key, item) for key, (item, _) in items.items()]


class Outboxes(Generic[Item]):
    """A replica's end."""

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox[Item]] = {}

    async def send(self, sending: Sending[Any], items: AsyncGenerator[Item, None]) -> int:
        """Have all of `items` fetched, each when it is there; how many there were.

        Raises what `items` does, and UnfetchedError.
        """
        outbox = self._outboxes.setdefault(sending.channel, _Outbox())
        outbox.streams += 1
        sent = 0
        try:
            async with aclosing(items):
                async for item in items:
                    await outbox.put(sending.key, item)
                    sent += 1
        finally:
            outbox.streams -= 1
            self._forget(sending.channel)
        return sent

    async def bundles(self, channel: str) -> AsyncGenerator[Bundle[Item], None]:
        """What there is to fetch, until there has been no stream for a little while."""
        outbox = self._outboxes.setdefault(channel, _Outbox())
        outbox.open = True
        try:
            while True:
                try:
                    async with asyncio.timeout(_LINGER_S):
                        await outbox.filled.wait()
                except TimeoutError:
                    if outbox.streams:
                        continue
                    return
                if bundle := outbox.taken():
                    yield bundle
        finally:
            outbox.open = False
            self._forget(channel)

    def _forget(self, channel: str) -> None:
        outbox = self._outboxes[channel]
        if not (outbox.streams or outbox.open):
            del self._outboxes[channel]


class _Inbox(Generic[Item]):
    """What came for one stream."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def add(self, item: Item) -> None:
        self.items.append(item)
        self.changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.changed.set()


class _Channel(Generic[Item]):
    """To one replica."""

    def __init__(self, parcel: Parcel[str]) -> None:
        self.parcel = parcel
        self.inboxes: dict[int, _Inbox[Item]] = {}
        self.task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.parcel.queries[0]


class BundledStreams(Generic[Query, Item]):
    """A gateway's end, over two methods of its replicas: `send` has the stream of a query sent and says of how many
    items it was, and `fetch` has the bundles of a channel. Both raise what a `Transport` does.
    """

    def __init__(
        self,
        send: Callable[[Parcel[Sending[Query]]], Awaitable[int]],
        fetch: Callable[[Parcel[str]], AsyncGenerator[Bundle[Item], None]],
    ) -> None:
        self._send = send
        self._fetch = fetch
        self._keys = count()
        self._channels: dict[str, _Channel[Item]] = {}
        """By replica."""

    async def items(self, parcel: Parcel[Query]) -> AsyncGenerator[Item, None]:
        """What a replica has to say to the only query of `parcel`, see `call.Streams`."""
        channel = self._channel(parcel)
        key = next(self._keys)
        inbox = channel.inboxes[key] = _Inbox()
        sending = Sending(channel.name, key, parcel.queries[0])
        call = asyncio.ensure_future(self._send(parcel.instead(sending)))
        call.add_done_callback(lambda _: inbox.changed.set())
        received = 0
        try:
            while True:
                inbox.changed.clear()
                items, inbox.items = inbox.items, []
                for item in items:
                    received += 1
                    yield item
                if items:
                    continue
                if call.done() and call.result() == received:
                    return
                if inbox.error:
                    raise inbox.error
                await inbox.changed.wait()
        finally:
            channel.inboxes.pop(key, None)
            call.cancel()
            call.add_done_callback(_noted)

    def _channel(self, parcel: Parcel[Query]) -> _Channel[Item]:
        if channel := self._channels.get(parcel.replica):
            return channel
        channel = _Channel(Parcel(parcel.replica, parcel.gateway, (uuid.uuid4().hex,)))
        self._channels[parcel.replica] = channel
        # in no request's context: when its client leaves, Serve ends all calls that were made in it
        channel.task = asyncio.create_task(self._follow(channel), context=Context())
        return channel

    async def _follow(self, channel: _Channel[Item]) -> None:
        """Bring what comes to the streams that it is for, as long as there are any."""
        try:
            while channel.inboxes:
                async with aclosing(self._fetch(channel.parcel)) as bundles:
                    async for bundle in bundles:
                        for key, item in bundle:
                            if inbox := channel.inboxes.get(key):
                                inbox.add(item)
        except (ReplicaLeftError, ReplicaLostError, NotDeployedError) as error:
            for inbox in channel.inboxes.values():
                inbox.fail(error)
        finally:
            del self._channels[channel.parcel.replica]


def _noted(call: asyncio.Future[int]) -> None:
    """asyncio complains of errors that nobody looked at."""
    if not call.cancelled():
        call.exception()
