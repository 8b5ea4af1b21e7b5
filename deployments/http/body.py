"""Request bodies: bounded, decompressed."""

from __future__ import annotations

import asyncio
import zlib

from fastapi import Request

from pliant.deployments.serving.errors import RequestError

LARGE = 65_536
"""Bytes from which on a body is parsed in a thread, so that the event loop stays responsive."""
_RECEIVE_WITHIN_S = 30
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, limit: int) -> bytes:
    """The body of `request`, of at most `limit` bytes before and after decompression.

    Raises RequestError: 408 when it does not arrive in time, 413 when it is larger, 415 for an unknown encoding, and
    400 when it cannot be decompressed.
    """
    try:
        async with asyncio.timeout(_RECEIVE_WITHIN_S):
            body = await _receive(request, limit)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {_RECEIVE_WITHIN_S} s") from None
    encoding = request.headers.get("content-encoding", "identity")
    return body if encoding == "identity" else _decompress(body, encoding, limit)


async def _receive(request: Request, limit: int) -> bytes:
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise RequestError(413, f"the body is larger than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding not in _WINDOW_BITS:
        raise RequestError(415, f"content-encoding {encoding!r}; allowed: identity, {', '.join(_WINDOW_BITS)}")
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        content = decompressor.decompress(body, limit)
    except zlib.error as error:
        raise RequestError(400, f"the body is not {encoding}: {error}") from None
    if decompressor.unconsumed_tail:
        raise RequestError(413, f"the decompressed body is larger than {limit} bytes")
    if not decompressor.eof:
        raise RequestError(400, f"the {encoding} body ends too early")
    if decompressor.unused_data:
        raise RequestError(400, f"the {encoding} body goes on after its end; send one member")
    return content
