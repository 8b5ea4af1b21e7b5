"""Server-sent events: the chunks of several answers in one stream, which never ends in silence."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

from pliant.deployments.http.openai_answers import Json, Shape, Usage
from pliant.deployments.http.resumption import Delivered, Pieces
from pliant.deployments.http.statuses import openai_body
from pliant.deployments.serving.outcome import Outcome, RequestError

logger = logging.getLogger("pliant")

_MOST_UNREAD = 16
"""Pieces of several answers that may wait for the client."""
INTERNAL = RequestError(Outcome.FAILED, "internal error; see the server's log")
"""What clients hear of what is no fault of theirs."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies on the way shall neither keep nor hold back what passes."""
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": nothing new yet\n"
"""One line of the event to come: some clients take an empty line after it for an event."""
_SILENT_S = 10.0
"""From one comment to the next: less than what proxies wait, which is half a minute or more."""

T = TypeVar("T")


async def interleaved(answers: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The pieces of `answers` as they come, each with the index of its answer.

    An answer waits while too many pieces are unread. The first error ends all, and so does closing.
    """
    if len(answers) == 1:
        async with aclosing(answers[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    unread: asyncio.Queue[tuple[int, T | Exception | None]] = asyncio.Queue(_MOST_UNREAD)

    async def pump(index: int, answer: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(answer) as pieces:
                async for piece in pieces:
                    await unread.put((index, piece))
        except Exception as error:
            await unread.put((index, error))
        else:
            await unread.put((index, None))

    pumps = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    try:
        live = len(answers)
        while live:
            index, item = await unread.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                live -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()


class EventStream(StreamingResponse):
    """Streams `events` of `pieces`. A client that leaves ends both at once.

    An error before the first piece is raised, so that the client gets its status, unless the first takes long: whenever
    nothing was sent for some time, a comment is, which clients skip and for which proxies keep the connection.
    """

    def __init__(self, pieces: Pieces, events: Callable[[Pieces], AsyncGenerator[bytes, None]]) -> None:
        self._pieces = pieces
        self._events = events
        super().__init__((), media_type="text/event-stream", headers=_HEADERS)

    async def stream_response(self, send: Send) -> None:
        body = _Body({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}, send)
        commenting = asyncio.create_task(body.comment())
        try:
            async with aclosing(self._pieces) as pieces, aclosing(self._events(await _begun(pieces, body))) as events:
                async for event in events:
                    await body.write(event)
            await body.write(b"", more=False)
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)


class _Body:
    """What is sent behind `head`, by one at a time."""

    def __init__(self, head: Message, send: Send) -> None:
        self._head = head
        self._send = send
        self._turn = asyncio.Lock()
        self._sent_at = time.monotonic()
        self.begun = False

    async def write(self, content: bytes, more: bool = True) -> None:
        async with self._turn:
            if not self.begun:
                self.begun = True
                await self._send(self._head)
            await self._send({"type": "http.response.body", "body": content, "more_body": more})
            self._sent_at = time.monotonic()

    async def comment(self) -> None:
        """Whenever nothing has been written for long."""
        while True:
            if (left_s := self._sent_at + _SILENT_S - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            else:
                await self.write(_COMMENT)


async def _begun(pieces: AsyncGenerator[T, None], body: _Body) -> AsyncGenerator[T, None]:
    """`pieces`, once there is one. Raises what they do before it; if `body` has begun, what is returned does."""
    try:
        first: T | Exception = await anext(pieces)
    except Exception as error:
        if not body.begun:
            raise
        first = error

    async def all_of_them() -> AsyncGenerator[T, None]:
        if isinstance(first, Exception):
            raise first
        yield first
        async for piece in pieces:
            yield piece

    return all_of_them()


class ChunkStream(EventStream):
    """Streams `pieces` in the shape of an endpoint.

    `envelope` makes a chunk of its choices. With `usage`, which counts the pieces, every chunk has the key, and the
    last its numbers. An error becomes the last event. `delivered` is what the client has of the one choice before, and
    `mark` goes into the ids of events.
    """

    def __init__(
        self,
        pieces: Pieces,
        choices: int,
        shape: Shape,
        envelope: Callable[[list[Json]], Json],
        usage: Usage | None,
        delivered: Delivered | None = None,
        mark: str = "",
    ) -> None:
        self._choices = choices
        self._shape = shape
        self._envelope = envelope if usage is None else lambda choices: {**envelope(choices), "usage": None}
        self._usage = usage
        self._delivered = delivered
        self._mark = mark
        super().__init__(pieces, self._run)

    async def _run(self, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        sent = (self._delivered or Delivered())._replace(mark=self._mark)
        try:
            for index in range(self._choices if self._delivered is None else 0):
                if opening := self._shape.opening(index):
                    yield self._chunk([opening], sent)
            async for index, piece in pieces:
                sent = sent.and_also(piece)
                if self._usage:
                    self._usage.add(index, piece)
                if piece.text or piece.finish or piece.logprobs:
                    yield self._chunk([self._shape.part(index, piece)], sent)
        except RequestError as error:
            yield _event(openai_body(error))
        except Exception:
            logger.exception("an answer was cut off")
            yield _event(openai_body(INTERNAL))
        else:
            if self._usage:
                yield _event({**self._envelope([]), "usage": self._usage.json()})
            yield _DONE

    def _chunk(self, choices: list[Json], sent: Delivered) -> bytes:
        """The event with these, after which the client has `sent`."""
        return _event(self._envelope(choices), sent if self._choices == 1 else None)


def _event(content: Any, id: Delivered | None = None) -> bytes:
    data = b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return data + b"\n\n" if id is None else data + f"\nid: {id}\n\n".encode()
