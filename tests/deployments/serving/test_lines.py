"""Calls over lines, on loopback."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from support.waiting import until

from pliant.deployments.serving import line as module
from pliant.deployments.serving import lines as kept
from pliant.deployments.serving.errors import ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.line import Address, Listener
from pliant.deployments.serving.lines import Lines
from pliant.deployments.serving.parcels import Parcel

HOST = "127.0.0.1"
MOST = 4


class Unreadable:
    """Can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return _never, ()


def _never() -> None:
    raise ValueError("of another version")


class Target:
    """Answers as it is asked to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.ended: list[str] = []

    async def answer(self, parcel: Parcel[Any]) -> Any:
        [query] = parcel.queries
        try:
            if query == "wait":
                await self.go_on.wait()
            if query == "raise":
                raise RuntimeError("it broke")
            if query == "cancel itself":
                raise asyncio.CancelledError
            return Unreadable() if query == "unreadable" else query
        finally:
            self.ended.append(str(query)[:20])

    async def items(self, parcel: Parcel[Any]) -> AsyncGenerator[Any, None]:
        try:
            for query in parcel.queries:
                yield await self.answer(parcel.instead(query))
        finally:
            self.ended.append("items")

    async def _hidden(self, parcel: Parcel[Any]) -> str:
        return "hidden"


class House:
    """A target that listens, and lines to it that are kept."""

    def __init__(self) -> None:
        self.target = Target()
        self.listener = Listener(self.target, MOST)
        self.broken: list[str] = []
        self.lines = Lines(self.broken.append)

    async def line(self, address: Address | None = None, replica: str = "a") -> module.Line:
        self.lines.sync({replica: address or await self.listener.listen(HOST)})
        return await connected(self.lines, replica)


async def connected(lines: Lines, replica: str) -> module.Line:
    return await until(lambda: lines.to(replica))


def parcel(*queries: Any) -> Parcel[Any]:
    return Parcel("a", "gateway", queries)


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    yield house
    house.lines.sync({})


async def test_calls_at_a_time_are_answered_as_they_end(house: House) -> None:
    line = await house.line()
    waits = asyncio.create_task(line.call("answer", parcel("wait")))
    await until(lambda: house.listener._under_way)
    assert await line.call("answer", parcel({"tokens": [1, 2, 3]})) == {"tokens": [1, 2, 3]}
    assert not waits.done()
    house.target.go_on.set()
    assert await waits == "wait"


async def test_long_messages_pass_both_ways(house: House) -> None:
    line = await house.line()
    text = "x" * 3_000_000
    assert await line.call("answer", parcel(text)) == text


async def test_a_stream_gives_all_items_in_order(house: House) -> None:
    line = await house.line()
    assert [item async for item in line.stream("items", parcel(*range(100)))] == list(range(100))


async def test_a_stream_that_is_closed_ends_in_the_replica(house: House) -> None:
    line = await house.line()
    stream = line.stream("items", parcel(1, "wait"))
    assert await anext(stream) == 1
    await stream.aclose()
    await until(lambda: "items" in house.target.ended)
    assert await line.call("answer", parcel("after")) == "after"


async def test_a_call_that_is_cancelled_ends_in_the_replica(house: House) -> None:
    line = await house.line()
    call = asyncio.create_task(line.call("answer", parcel("wait")))
    await until(lambda: house.listener._under_way)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: house.target.ended == ["wait"])
    await until(lambda: not house.listener._under_way)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("raise", "RuntimeError: it broke"),
        ("cancel itself", "it was cancelled"),
        ("unreadable", "ValueError: of another version"),
        (Unreadable(), "ValueError: of another version"),
    ],
    ids=["raises", "cancelled", "answer", "question"],
)
async def test_what_breaks_down_is_lost_and_nothing_else(house: House, query: Any, said: str) -> None:
    line = await house.line()
    with pytest.raises(ReplicaLostError, match=said):
        await line.call("answer", parcel(query))
    with pytest.raises(ReplicaLostError, match=said):
        async for _ in line.stream("items", parcel(query)):
            pass
    assert await line.call("answer", parcel("after")) == "after"


@pytest.mark.parametrize("method", ["_hidden", "unknown"])
async def test_only_public_methods_are_called(house: House, method: str) -> None:
    line = await house.line()
    with pytest.raises(ReplicaLostError, match="AttributeError"):
        await line.call(method, parcel(1))


async def test_no_more_calls_are_taken_than_there_may_be(house: House) -> None:
    line = await house.line()
    waiting = [asyncio.create_task(line.call("answer", parcel("wait"))) for _ in range(MOST)]
    await until(lambda: house.listener._under_way == MOST)
    with pytest.raises(ReplicaLeftError):
        await line.call("answer", parcel("one more"))
    with pytest.raises(ReplicaLeftError):
        await anext(line.stream("items", parcel("one more")))
    house.target.go_on.set()
    assert await asyncio.gather(*waiting) == ["wait"] * MOST
    assert await line.call("answer", parcel("after")) == "after"


async def test_a_drain_waits_for_what_is_under_way_and_takes_no_more(house: House) -> None:
    line = await house.line()
    waits = asyncio.create_task(line.call("answer", parcel("wait")))
    await until(lambda: house.listener._under_way)
    drained = asyncio.create_task(house.listener.drain())
    assert await line.call("answer", parcel("while it waits")) == "while it waits"
    assert not drained.done()
    house.target.go_on.set()
    assert await waits == "wait"
    await drained
    with pytest.raises(ReplicaLeftError):
        await line.call("answer", parcel("after"))


async def test_calls_of_a_connection_that_breaks_are_lost_and_there_is_a_new_one(house: House) -> None:
    line = await house.line()
    call = asyncio.create_task(line.call("answer", parcel("wait")))
    pieces = line.stream("items", parcel(1, "wait"))
    assert await anext(pieces) == 1
    await until(lambda: house.listener._under_way == 2)
    line.close()
    with pytest.raises(ReplicaLostError, match="broke"):
        await call
    with pytest.raises(ReplicaLostError, match="broke"):
        await anext(pieces)
    await until(lambda: house.broken == ["a"])
    await until(lambda: not house.listener._under_way)
    with pytest.raises(ReplicaLeftError):
        await line.call("answer", parcel("after"))
    again = await connected(house.lines, "a")
    assert await again.call("answer", parcel("again")) == "again"


async def test_calls_of_a_replica_that_left_go_on_and_then_the_connection_ends(house: House) -> None:
    line = await house.line()
    call = asyncio.create_task(line.call("answer", parcel("wait")))
    await until(lambda: house.listener._under_way)
    house.lines.sync({})
    await asyncio.sleep(0)
    assert house.lines.to("a") is None
    house.target.go_on.set()
    assert await call == "wait"
    async with asyncio.timeout(30):
        await line.closed
    assert not house.broken


async def test_whoever_does_not_know_the_secret_is_not_heard(house: House) -> None:
    address = await house.listener.listen(HOST)
    assert await module.connected(address._replace(secret=b"another")) is None


async def test_a_stranger_that_listens_there_is_not_called(house: House) -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(module._VERSION + bytes(module._NONCE))
        await reader.readexactly(module._PROOF + module._NONCE)
        writer.write(bytes(module._PROOF))

    server = await asyncio.start_server(stranger, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await module.connected(Address(HOST, port, b"secret")) is None


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"", bytes(1000)], ids=["http", "nothing", "zeros"])
async def test_nothing_of_a_stranger_is_read(house: House, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(module, "_GREETED_WITHIN_S", 0.05)
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("it was unpickled"))
    address = await house.listener.listen(HOST)
    reader, writer = await asyncio.open_connection(*address[:2])
    writer.write(said)
    async with asyncio.timeout(30):
        assert (await reader.read()).startswith(module._VERSION)
    writer.close()


async def test_a_frame_that_is_too_long_ends_the_connection(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    line = await house.line()
    monkeypatch.setattr(module, "_MOST_BYTES", 1000)
    with pytest.raises(ReplicaLostError, match="broke"):
        await line.call("answer", parcel("x" * 2000))


async def test_people_hear_of_a_port_that_cannot_be_reached(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_AGAIN_S", 0.001)
    assert house.lines.state("a") == "none"
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        house.lines.sync({"a": Address(HOST, bound.getsockname()[1], b"secret")})
        assert house.lines.state("a") == "opening"
        await until(lambda: house.lines.state("a") == "failed")
    house.lines.sync({})
    assert house.lines.state("a") == "none"
    await house.line()
    assert house.lines.state("a") == "open"


async def test_where_nobody_listens_there_is_no_line() -> None:
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        assert await module.connected(Address(HOST, bound.getsockname()[1], b"secret")) is None


def test_the_loop_of_rays_workers_will_do() -> None:
    async def check() -> None:
        house = House()
        line = await house.line()
        assert await line.call("answer", parcel("x" * 3_000_000)) == "x" * 3_000_000
        assert [item async for item in line.stream("items", parcel(*range(100)))] == list(range(100))
        call = asyncio.create_task(line.call("answer", parcel("wait")))
        await until(lambda: house.listener._under_way)
        line.close()
        with pytest.raises(ReplicaLostError):
            await call
        await connected(house.lines, "a")
        house.lines.sync({})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())
