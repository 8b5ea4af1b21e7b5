"""A line: one TCP connection from a gateway to a replica, which carries all calls at a time.

Each side proves first that it knows the secret that the replica told Ray, and nothing is unpickled before. Then come
frames: a header with the length of what follows, the number of the call and an `_Op`, and then a pickle. When a
connection breaks, the calls that it carries are lost.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import pickle
import secrets
import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import Context
from enum import IntEnum
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

from pliant.deployments.serving.errors import ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.parcels import Parcel

_VERSION = b"pliant line 1\n"
_NONCE = _PROOF = 32
"""Bytes."""
_HEADER = struct.Struct(">IQB")
_MOST_BYTES = 1 << 28
"""Of a pickle; a connection with a longer one is closed."""
_GREETED_WITHIN_S = 5.0
_UNANSWERED_MS = 10_000
"""After which the kernel gives up a connection whose other side's kernel is silent."""


class _Op(IntEnum):
    CALL = 1
    """(method, parcel)"""
    CANCEL = 2
    RETURN = 3
    ITEM = 4
    END = 5
    """No further item comes."""
    RAISE = 6
    """What the error says."""
    FULL = 7
    """The call was not taken."""


class Address(NamedTuple):
    """Where a replica listens, and what shows that it is that one, and who may call."""

    host: str
    port: int
    secret: bytes


class _Side(asyncio.Protocol):
    """What both sides of a connection do: greet, and read and write frames."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.open = False
        """The other side has proved itself, and has not gone."""
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        asyncio.get_running_loop().call_later(_GREETED_WITHIN_S, self._close_unless_open)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.open = False
        self._writable.set()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._transport and (self._frame() if self.open else self._greeting()):
            pass

    def close(self) -> None:
        """Calls under way are lost."""
        if self._transport:
            self._transport.abort()

    def _close_unless_open(self) -> None:
        if not self.open:
            self.close()

    def _read(self, size: int) -> bytes | None:
        """The next `size` bytes, once they are there."""
        if len(self._received) < size:
            return None
        read = bytes(self._received[:size])
        del self._received[:size]
        return read

    def _frame(self) -> bool:
        """Take one frame, if it is there."""
        if len(self._received) < _HEADER.size:
            return False
        length, number, op = _HEADER.unpack_from(self._received)
        if length > _MOST_BYTES:
            self.close()
            return False
        if (frame := self._read(_HEADER.size + length)) is None:
            return False
        self._take(op, number, frame[_HEADER.size :])
        return True

    def _write(self, op: _Op, number: int, body: bytes = b"") -> None:
        if self._transport:
            self._transport.write(_HEADER.pack(len(body), number, op) + body)

    def _proof(self, side: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, side + nonce, "sha256")

    def _greeting(self) -> bool:
        """Take a part of the greeting, if it is there."""
        raise NotImplementedError

    def _take(self, op: int, number: int, body: bytes) -> None:
        raise NotImplementedError


class _Served(_Side):
    """A replica's side."""

    def __init__(self, listener: Listener, secret: bytes) -> None:
        super().__init__(secret)
        self._listener = listener
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport
        self._transport.write(_VERSION + self._nonce)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for task in self._tasks.values():
            task.cancel()

    def _greeting(self) -> bool:
        if (said := self._read(_PROOF + _NONCE)) is None:
            return False
        proof, nonce = said[:_PROOF], said[_PROOF:]
        assert self._transport
        if not hmac.compare_digest(proof, self._proof(b"gateway", self._nonce)):
            self.close()
            return False
        self._transport.write(self._proof(b"replica", nonce))
        self.open = True
        return True

    def _take(self, op: int, number: int, body: bytes) -> None:
        if op == _Op.CALL:
            if not self._listener.begin():
                self._write(_Op.FULL, number)
                return
            task = asyncio.get_running_loop().create_task(self._answer(number, body), context=Context())
            self._tasks[number] = task
            task.add_done_callback(partial(self._ended, number))
        elif op == _Op.CANCEL and (under_way := self._tasks.get(number)):
            under_way.cancel()

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._listener.end()
        if task.cancelled():  # perhaps not by the caller
            self._write(_Op.RAISE, number, pickle.dumps("it was cancelled"))

    async def _answer(self, number: int, body: bytes) -> None:
        try:
            method, parcel = pickle.loads(body)
            called = self._listener.method(method)
            if inspect.isasyncgenfunction(called):
                async with aclosing(called(parcel)) as items:
                    async for item in items:
                        await self._writable.wait()
                        self._write(_Op.ITEM, number, pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
                self._write(_Op.END, number)
            else:
                found = pickle.dumps(await called(parcel), pickle.HIGHEST_PROTOCOL)
                await self._writable.wait()
                self._write(_Op.RETURN, number, found)
        except Exception as error:
            self._write(_Op.RAISE, number, pickle.dumps(f"{type(error).__name__}: {error}"))


class Listener:
    """A replica's end of all its lines: calls public methods of `target` that take a parcel, `most` at a time."""

    def __init__(self, target: Any, most: int) -> None:
        self._target = target
        self._most = most
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> Address:
        """From now on."""
        secret = secrets.token_bytes(_PROOF)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Served(self, secret), host, 0)
        return Address(host, self._server.sockets[0].getsockname()[1], secret)

    async def drain(self) -> None:
        """Return once no call is under way, and take no other from then on."""
        await self._idle.wait()
        self._most = 0
        if self._server:
            self._server.close()

    def begin(self) -> bool:
        """Whether another call may be taken; it then counts until `end`."""
        if self._under_way >= self._most:
            return False
        self._under_way += 1
        self._idle.clear()
        return True

    def end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    def method(self, name: str) -> Callable[[Any], Any]:
        """Raises AttributeError."""
        if name.startswith("_"):
            raise AttributeError(f"{name} is not for callers")
        method: Callable[[Any], Any] = getattr(self._target, name)
        return method


class Line(_Side):
    """A gateway's side."""

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret)
        self._greeted = False
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[tuple[int, bytes]]] = {}
        self._retired = False
        self.opened = asyncio.get_running_loop().create_future()
        """Whether calls can be made; they never can after it was False."""

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self.opened.done():
            self.opened.set_result(False)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(ReplicaLostError("its connection broke"))
        for items in self._streams.values():
            items.put_nowait((_Op.RAISE, pickle.dumps("its connection broke")))

    async def call(self, method: str, parcel: Parcel[Any]) -> Any:
        """What `method` of the replica returns for `parcel`. To cancel it ends the call in the replica.

        Raises ReplicaLostError, and ReplicaLeftError when the replica takes no more calls.
        """
        number = await self._begin(method, parcel)
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        except asyncio.CancelledError:
            self._write(_Op.CANCEL, number)
            raise
        finally:
            del self._calls[number]
            self._close_if_done()

    async def stream(self, method: str, parcel: Parcel[Any]) -> AsyncGenerator[Any, None]:
        """What `method` of the replica yields for `parcel`, kept until asked for. To close it ends the call there.

        Raises what `call` does.
        """
        number = await self._begin(method, parcel)
        items = self._streams[number] = asyncio.Queue()
        ended = False
        try:
            while True:
                op, body = await items.get()
                if ended := op != _Op.ITEM:
                    if op == _Op.END:
                        return
                    raise _error(op, body)
                yield _loaded(body)
        finally:
            del self._streams[number]
            if not ended:
                self._write(_Op.CANCEL, number)
            self._close_if_done()

    def retire(self) -> None:
        """Close the connection once it carries no call."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not (self._calls or self._streams) and self._transport:
            self._transport.close()

    async def _begin(self, method: str, parcel: Parcel[Any]) -> int:
        body = pickle.dumps((method, parcel), pickle.HIGHEST_PROTOCOL)
        await self._writable.wait()
        if not self.open:
            raise ReplicaLeftError("its connection broke")
        number = next(self._numbers)
        self._write(_Op.CALL, number, body)
        return number

    def _greeting(self) -> bool:
        assert self._transport
        if not self._greeted:
            if (said := self._read(len(_VERSION) + _NONCE)) is None:
                return False
            if not said.startswith(_VERSION):
                self.close()
                return False
            self._transport.write(self._proof(b"gateway", said[len(_VERSION) :]) + self._nonce)
            self._greeted = True
            return True
        if (proof := self._read(_PROOF)) is None:
            return False
        if not hmac.compare_digest(proof, self._proof(b"replica", self._nonce)):
            self.close()
            return False
        self.open = True
        if not self.opened.done():
            self.opened.set_result(True)
        return True

    def _take(self, op: int, number: int, body: bytes) -> None:
        if items := self._streams.get(number):
            items.put_nowait((op, body))
        elif (call := self._calls.get(number)) and not call.done():
            try:
                if op == _Op.RETURN:
                    call.set_result(_loaded(body))
                else:
                    call.set_exception(_error(op, body))
            except ReplicaLostError as error:
                call.set_exception(error)


def _loaded(body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:  # of another version, above all
        raise ReplicaLostError(f"{type(error).__name__}: {error}") from error


def _error(op: int, body: bytes) -> Exception:
    if op == _Op.FULL:
        return ReplicaLeftError("it takes no more calls")
    return ReplicaLostError(_loaded(body))


async def connected(address: Address) -> Line | None:
    """A line that can be used; None where nobody listens who knows the secret."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_GREETED_WITHIN_S):
            _, line = await loop.create_connection(lambda: Line(address.secret), address.host, address.port)
    except OSError:
        return None
    try:
        return line if await line.opened else None
    except asyncio.CancelledError:
        line.close()
        raise
