"""Streams that have nothing to say for long, as when a prompt is long: clients and proxies see that they are alive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message

from pliant.deployments.http.openai_stream import EventStream
from pliant.deployments.http.resumption import Pieces
from pliant.deployments.llm.request import Piece
from pliant.deployments.serving.outcome import Outcome, RequestError

pytestmark = pytest.mark.virtual_time

COMMENT = ": nothing new yet"


async def pieces(plan: Sequence[float | str | Exception], closed: list[str] | None = None) -> Pieces:
    """Texts, errors, and seconds before them."""
    try:
        for each in plan:
            if isinstance(each, Exception):
                raise each
            if isinstance(each, str):
                yield 0, Piece((1,), each)
            else:
                await asyncio.sleep(each)
    finally:
        if closed is not None:
            closed.append("pieces")


async def events(pieces: Pieces) -> AsyncGenerator[bytes, None]:
    try:
        async for _, piece in pieces:
            yield f"data: {piece.text}\n\n".encode()
    except RequestError as error:
        yield f"data: error: {error.reason}\n\n".encode()


class Client:
    """What arrives, and when."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.status: int | None = None
        self.lines: list[tuple[float, str]] = []
        self.body = b""
        self.ended = False
        self._takes_s = takes_s
        self._since = asyncio.get_running_loop().time()

    async def send(self, message: Message) -> None:
        await asyncio.sleep(self._takes_s)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.body += message["body"]
        if text := message["body"].decode().strip():
            self.lines.append((round(asyncio.get_running_loop().time() - self._since), text))
        self.ended = not message["more_body"]


async def run(plan: Sequence[float | str | Exception], client: Client) -> None:
    await EventStream(pieces(plan), events).stream_response(client.send)


async def test_a_stream_says_that_it_lives_when_nothing_was_said_for_ten_seconds() -> None:
    client = Client()
    await run([25.0, "a", 5.0, "b", 12.0, "c"], client)
    assert client.lines == [
        (10, COMMENT),
        (20, COMMENT),
        (25, "data: a"),
        (30, "data: b"),
        (40, COMMENT),
        (42, "data: c"),
    ]
    assert client.status == 200
    assert client.ended


async def test_programs_written_for_openai_skip_comments_amid_events_with_ids() -> None:
    async def with_ids(pieces: Pieces) -> AsyncGenerator[bytes, None]:
        async for index, piece in pieces:
            content = {"choices": [{"index": index, "text": piece.text}]}
            yield f"data: {json.dumps(content)}\nid: {piece.text}\n\n".encode()

    client = Client()
    await EventStream(pieces([15.0, "a", 35.0, "b"]), with_ids).stream_response(client.send)
    assert client.body.count(COMMENT.encode()) == 4
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=client.body)
    transport = httpx.MockTransport(lambda _: answer)
    with openai.OpenAI(api_key="none", http_client=httpx.Client(transport=transport)) as program:
        chunks = list(program.completions.create(model="any", prompt="", stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["a", "b"]


async def test_a_stream_that_goes_on_needs_no_comments() -> None:
    client = Client()
    await run([4.0, "a"] * 10, client)
    assert [text for _, text in client.lines] == ["data: a"] * 10


async def test_an_early_error_has_a_status_and_a_late_one_is_an_event() -> None:
    error = RequestError(Outcome.UNAVAILABLE, "no replica")
    client = Client()
    with pytest.raises(RequestError):
        await run([9.0, error], client)
    assert (client.status, client.lines) == (None, [])
    await run([11.0, error], client)
    assert client.status == 200
    assert client.lines[-1][1] == "data: error: no replica"
    assert client.ended


async def test_comments_stand_between_events_and_end_with_the_stream() -> None:
    """A client that takes each message slowly never gets two at once."""
    client = Client(takes_s=7.0)
    await run(["a", 9.0, "b", 30.0, "c"], client)
    texts = [text for _, text in client.lines]
    assert [text for text in texts if text != COMMENT] == ["data: a", "data: b", "data: c"]
    assert COMMENT in texts
    sent = len(client.lines)
    await asyncio.sleep(60)
    assert len(client.lines) == sent


async def test_who_leaves_ends_the_pieces() -> None:
    closed: list[str] = []
    stream: Any = EventStream(pieces([100.0, "a"], closed), events)
    client = Client()
    task = asyncio.create_task(stream.stream_response(client.send))
    await asyncio.sleep(15)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["pieces"]
    await asyncio.sleep(60)
    assert len(client.lines) == 1
