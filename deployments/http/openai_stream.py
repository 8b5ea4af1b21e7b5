"""Server-sent events: the chunks of several answers in one stream, which never ends in silence."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Send

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


async def begun(pieces: Pieces) -> Pieces:
    """`pieces`, once there is one: an error before it is raised here, while the client can still get a status."""
    try:
        first = await anext(pieces)
    except BaseException:
        await pieces.aclose()
        raise

    async def rest() -> Pieces:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return rest()


class EventStream(StreamingResponse):
    """Streams `events`, which are made of `pieces`. A client that leaves ends both at once."""

    def __init__(self, pieces: Pieces, events: AsyncGenerator[bytes, None]) -> None:
        self._pieces = pieces
        self._events = events
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._pieces), aclosing(self._events):
            await super().stream_response(send)


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
        super().__init__(pieces, self._run())

    async def _run(self) -> AsyncGenerator[bytes, None]:
        sent = (self._delivered or Delivered())._replace(mark=self._mark)
        try:
            for index in range(self._choices if self._delivered is None else 0):
                if opening := self._shape.opening(index):
                    yield self._chunk([opening], sent)
            async for index, piece in self._pieces:
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
