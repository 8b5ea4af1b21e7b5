"""Calls of one turn of the event loop to one replica travel in one Ray call, and their answers too.

A call to a Ray actor costs about as much for one text as for sixty. Whatever is sent to the same replica before the
loop comes round again, the texts of one request above all, leaves in one parcel; a parcel of several is answered in
parts, each of all that is done by then, so that nobody waits for the slowest.

Plain asyncio, without Ray: a `Transport` carries the parcels.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from contextvars import Context
from typing import Any, Generic, Protocol, TypeVar

from pliant.deployments.serving.logs import worked_on
from pliant.deployments.serving.parcels import Parcel, Refusal

MOST = 256
"""Queries in a parcel."""

Query = TypeVar("Query")
Answer = TypeVar("Answer")
Given = TypeVar("Given", covariant=True)


class Transport(Protocol[Query, Given]):
    """Carries parcels to replicas. Cancelled or closed, it has the replica drop what it has not answered.

    Raises ReplicaLostError when the replica dies, ReplicaLeftError when it left before, NotDeployedError when there is
    none at all.
    """

    async def one(self, parcel: Parcel[Query]) -> Given | Refusal:
        """The reply to the only query of `parcel`."""

    def several(self, parcel: Parcel[Query]) -> AsyncGenerator[Sequence[tuple[int, Given | Refusal]], None]:
        """Replies as they are made, each with the index of its query."""


class Calls(Transport[Any, Any], Protocol):
    """Calls other methods of replicas, too, that are given a parcel; they end, and raise, as a transport's."""

    async def call(self, method: str, parcel: Parcel[Any]) -> Any:
        """What `method` returns."""

    def stream(self, method: str, parcel: Parcel[Any]) -> AsyncGenerator[Any, None]:
        """What `method` yields."""


class Courier(Generic[Query, Answer]):
    """Sends for one service. Whoever no longer wants a reply cancels the future that promises it."""

    def __init__(self, gateway: str, transport: Transport[Query, Answer]) -> None:
        self._gateway = gateway
        self._transport = transport
        self._waiting: dict[str, list[tuple[Query, str, str, asyncio.Future[Answer | Refusal]]]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def send(self, replica: str, query: Query, trace: str = "") -> asyncio.Future[Answer | Refusal]:
        """The reply to come of `replica`, as a part of `trace`; it raises what the transport does."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Answer | Refusal] = loop.create_future()
        if not self._waiting:
            # in no request's context: when its client leaves, Serve ends all calls that were made in it
            loop.call_soon(self._depart, context=Context())
        self._waiting.setdefault(replica, []).append((query, worked_on(), trace, reply))
        return reply

    def _depart(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for replica, mail in waiting.items():
            wanted = [each for each in mail if not each[-1].cancelled()]
            for start in range(0, len(wanted), MOST):
                queries, requests, traces, replies = zip(*wanted[start : start + MOST], strict=True)
                said = [each if any(each) else () for each in (requests, traces)]
                parcel = Parcel(replica, self._gateway, queries, *said)
                task = asyncio.create_task(self._carry(parcel, replies))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
                _cancel_with_all(task, replies)

    async def _carry(self, parcel: Parcel[Query], replies: Sequence[asyncio.Future[Answer | Refusal]]) -> None:
        try:
            if len(replies) == 1:
                _settle(replies[0], await self._transport.one(parcel))
            else:
                async with aclosing(self._transport.several(parcel)) as parts:
                    async for part in parts:
                        for index, found in part:
                            _settle(replies[index], found)
        except Exception as error:
            for reply in replies:
                if not reply.done():
                    reply.set_exception(error)
        for reply in replies:
            _settle(reply, Refusal("failed", "the replica did not answer"))


async def each(answers: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """All `answers`, which come at the same time; when one fails or the client leaves, the others end."""
    if len(answers) == 1:
        return [await answers[0]]
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _settle(reply: asyncio.Future[Answer | Refusal], found: Answer | Refusal) -> None:
    if not reply.done():
        reply.set_result(found)


def _cancel_with_all(task: asyncio.Task[None], replies: Sequence[asyncio.Future[Answer | Refusal]]) -> None:
    """Cancel `task` once nobody waits for any of `replies` any more, unless all have come."""
    wanted = len(replies)
    left = False

    def ended(reply: asyncio.Future[Answer | Refusal]) -> None:
        nonlocal wanted, left
        wanted -= 1
        left |= reply.cancelled()
        if not wanted and left:
            task.cancel()

    for reply in replies:
        reply.add_done_callback(ended)
