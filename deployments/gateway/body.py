"""Request bodies: bounded, decompressed."""

from __future__ import annotations

import zlib

from fastapi import Request

from pliant.deployments.gateway.errors import RequestError

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, limit: int) -> bytes:
    """The body of `request`, of at most `limit` bytes before and after decompression.

    Raises RequestError: 413 when it is larger, 415 for an unknown encoding, 400 when it cannot be decompressed.
    """
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise RequestError(413, f"the body is larger than {limit} bytes")
        chunks.append(chunk)
    body = b"".join(chunks)
    encoding = request.headers.get("content-encoding", "identity")
    return body if encoding == "identity" else _decompress(body, encoding, limit)


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
    return content
