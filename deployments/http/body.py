"""Request bodies: bounded, decompressed, and parsed without holding up the event loop."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

T = TypeVar("T")

LARGE = 65_536
"""Bytes from which on a body is parsed in a thread, so that the event loop stays responsive."""
MOST_VALUES = 262_144
"""In a JSON body: each takes some dozens of bytes and nanoseconds, however few bytes it was sent in."""
MOST_NESTED = 65_536
"""Lists, objects and their keys, which take hundreds."""
_RECEIVE_WITHIN_S = 30
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, limit: int) -> bytes:
    """The body of `request`, of at most `limit` bytes before and after decompression.

    Raises RequestError when it does not arrive in time, is larger, has an unknown encoding or cannot be decompressed.
    """
    try:
        async with asyncio.timeout(_RECEIVE_WITHIN_S):
            body = await _receive(request, limit)
    except TimeoutError:
        raise RequestError(
            Outcome.REJECTED, f"the body did not arrive within {_RECEIVE_WITHIN_S} s", fault=Fault.SLOW_BODY
        ) from None
    encoding = request.headers.get("content-encoding", "identity")
    return body if encoding == "identity" else _decompress(body, encoding, limit)


async def _receive(request: Request, limit: int) -> bytes:
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise RequestError(Outcome.REJECTED, f"the body is larger than {limit} bytes", fault=Fault.TOO_LARGE)
        chunks.append(chunk)
    return b"".join(chunks)


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding not in _WINDOW_BITS:
        raise RequestError(
            Outcome.REJECTED,
            f"content-encoding {encoding!r}; allowed: identity, {', '.join(_WINDOW_BITS)}",
            fault=Fault.MEDIA_TYPE,
        )
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        content = decompressor.decompress(body, limit)
    except zlib.error as error:
        raise RequestError(Outcome.REJECTED, f"the body is not {encoding}: {error}") from None
    if decompressor.unconsumed_tail:
        raise RequestError(
            Outcome.REJECTED, f"the decompressed body is larger than {limit} bytes", fault=Fault.TOO_LARGE
        )
    if not decompressor.eof:
        raise RequestError(Outcome.REJECTED, f"the {encoding} body ends too early")
    if decompressor.unused_data:
        raise RequestError(Outcome.REJECTED, f"the {encoding} body goes on after its end; send one member")
    return content


async def off_loop(size: int, convert: Callable[[], T]) -> T:
    """What `convert` makes of, or into, `size` bytes; in a thread if these are many."""
    return await asyncio.to_thread(convert) if size > LARGE else convert()


def check_json(body: bytes) -> None:
    """Raise RequestError for a JSON `body` of so many values that to parse it would take long, or much memory.

    It costs some milliseconds a megabyte, and is exact for JSON: what stands in strings does not count. Of anything
    else it counts at least all that a parser reads before the first error.
    """
    if _count(body, b",:[{") <= MOST_NESTED:
        return
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') <= 2 * (MOST_VALUES + MOST_NESTED):  # of values and of keys
        bare = b"".join(bare.split(b'"')[::2])
        if _count(bare, b",[{") < MOST_VALUES and _count(bare, b":[{") <= MOST_NESTED:
            return
    raise RequestError(
        Outcome.REJECTED,
        f"the JSON has more than {MOST_VALUES} values, or {MOST_NESTED} lists, objects and keys; send less at once, "
        "and tensors in binary",
        fault=Fault.TOO_LARGE,
    )


def _count(text: bytes, marks: bytes) -> int:
    return sum(map(text.count, marks))
