"""What costs a gateway something beside its requests: people who look at its console, and traces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp

from pliant.bench.load import LoadError

VIEWERS = 10
_SENT_WITHIN_S = 30
"""However long processes wait until they send what they have."""


@asynccontextmanager
async def watched(http: aiohttp.ClientSession, address: str) -> AsyncIterator[None]:
    """`VIEWERS` follow the console of the application at `address` meanwhile."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(http.get(f"{address}/console/stream")) for _ in range(VIEWERS)]
        for stream in streams:
            if stream.status != 200:
                raise LoadError(f"the console answered {stream.status}: {await stream.text()}")
            await stream.content.readuntil(b"\n\n")
        readers = [asyncio.create_task(_read(stream)) for stream in streams]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _read(stream: aiohttp.ClientResponse) -> None:
    async for _ in stream.content.iter_any():
        pass


class Collector:
    """Takes spans by OTLP over HTTP, and keeps none."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.received = 0
        """Bytes."""

    async def some(self) -> None:
        """Wait for the first. Raises LoadError if none come."""
        for _ in range(_SENT_WITHIN_S):
            if self.received:
                return
            await asyncio.sleep(1)
        raise LoadError("no spans came; run: pip install 'pliant[traces]'")


@contextmanager
def collector() -> Iterator[Collector]:
    """One, meanwhile."""

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.received += len(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Takes) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
