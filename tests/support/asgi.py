"""An HTTP client that speaks ASGI, and sends and reads only when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message


class Exchange:
    """One request to `app`, and what has come of it. It reads at once, unless `reads` is cleared."""

    def __init__(
        self, app: ASGIApp, path: str, method: str = "POST", headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.reads = asyncio.Event()
        self.reads.set()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    def send(self, body: bytes = b"", more: bool = False) -> None:
        """Send a part of the body, the last unless there is `more`."""
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def settled(self) -> Exchange:
        """This, once nothing happens any more that takes no time."""
        await asyncio.sleep(0.01)
        return self

    async def over(self) -> Exchange:
        """This, once it has its answer."""
        await self.task
        return self

    async def left(self) -> None:
        """Leave."""
        self.task.cancel()
        await asyncio.wait([self.task])

    def json(self) -> Any:
        return json.loads(self.body)

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
