"""What stands before Serve's own code, in its HTTP proxies and in gateways that HAProxy asks: ASGI middleware.

Serve builds it in by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, which names `middlewares`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant import haproxy
from pliant.deployments.http.statuses import BUSY, error_response
from pliant.deployments.serving.logs import REQUEST_ID
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

logger = logging.getLogger("pliant")

_SERVE_S = (b"x-request-", b"x-session-id", b"serve-multiplexed-model-id")
"""What Serve's headers begin with that tell it how to treat a request: whom to send it to, when to give it up."""
_TRACING = (b"traceparent", b"tracestate")
_ID = re.compile(rb"[!-~]{1,128}")
_WRITE_WITHIN_S = 30.0
_PART = 65_536
"""Bytes; as many are on their way when uvicorn has whoever writes wait."""
_SERVE_S_PATHS = "/-/"
_PASSWORD_HEADER = haproxy.PASSWORD_HEADER.encode()
_STRANGER = RequestError(
    Outcome.REJECTED, "this port is HAProxy's alone; ask at the cluster's address", fault=Fault.FORBIDDEN
)


def middlewares() -> list[Middleware]:
    """For Serve."""
    return [Middleware(Edge, password=os.environ.get(haproxy.PASSWORD))]


class Edge:
    """Keeps what strangers send from Serve, what Serve says of itself in the clients' protocol, and slow readers out.

    Serve obeys some headers, and breaks down over others: of these only an `x-request-id` that can be printed passes.
    A client that takes nothing of its answer for `write_within_s` is cut off; until then whoever writes waits for it.
    The head of an answer leaves with the first part of its body: HAProxy asks another gateway if this one dies before.
    With a `password` nobody is answered but who says it, which HAProxy does; on Serve's own pages also all others.
    """

    def __init__(self, app: ASGIApp, password: str | None = None, write_within_s: float = _WRITE_WITHIN_S) -> None:
        self._app = app
        self._password = password.encode() if password else None
        self._write_within_s = write_within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if not self._admits(scope):
                await error_response(scope, _STRANGER)(scope, receive, send)
                return
            scope = {**scope, "headers": list(_trusted(scope["headers"]))}
            send = _Answer(scope, receive, self._bounded(send)).send
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if self._password is None or scope["path"].startswith(_SERVE_S_PATHS):
            return True
        given = dict(scope["headers"]).get(_PASSWORD_HEADER, b"")
        return hmac.compare_digest(given, self._password)

    def _bounded(self, send: Send) -> Send:
        head: Message | None = None

        async def bounded(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                return
            try:
                for part in _parts(message):
                    async with asyncio.timeout(self._write_within_s):
                        if head:
                            with _one_write(send):
                                await send(head)
                                await send(part)
                            head = None
                        else:
                            await send(part)
            except TimeoutError:
                logger.info("a client took nothing of its answer for %s s, and is cut off", self._write_within_s)
                _abort(send)

        return bounded


@contextmanager
def _one_write(send: Send) -> Iterator[None]:
    """What uvicorn's `send` writes within leaves together."""
    cycle: Any = getattr(send, "__self__", None)
    if not hasattr(cycle, "transport"):
        yield
        return
    transport = cycle.transport
    together = cycle.transport = _Together(transport)
    try:
        yield
    finally:
        cycle.transport = transport
        together.flush()


class _Together:
    """A transport that keeps what is written to it until `flush`, or `close`."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()


def _parts(message: Message) -> Iterator[Message]:
    """`message` in parts of which uvicorn takes the next only once most of the one before is sent."""
    body = message.get("body", b"")
    while len(body) > _PART:
        yield {**message, "body": body[:_PART], "more_body": True}
        body = body[_PART:]
    yield {**message, "body": body} if "body" in message else message


def _abort(send: Send) -> None:
    """Close the connection of uvicorn's `send` at once, whatever has not been read; Serve then cancels the request."""
    cycle: Any = send.__self__  # type: ignore[attr-defined]
    cycle.transport.abort()


def _trusted(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    named = False
    for name, value in headers:
        plain = name.lower().replace(b"_", b"-")
        if plain == REQUEST_ID:
            if not named and _ID.fullmatch(value):
                named = True
                yield REQUEST_ID, value
        elif (
            plain != _PASSWORD_HEADER and not plain.startswith(_SERVE_S) and (plain not in _TRACING or value.isascii())
        ):
            yield name, value


class _Answer:
    """Passes an answer on; one in which Serve itself refuses a request is written as the client's protocol has it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._refusal: Message | None = None
        self._reason = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._is_refusal(message):
            self._refusal = message
        elif self._refusal is None:
            await self._send(message)
        else:
            self._reason += message.get("body", b"")
            if not message.get("more_body", False):
                await self._rewritten(self._refusal)(self._scope, self._receive, self._send)

    def _is_refusal(self, start: Message) -> bool:
        """Whether it is Serve's: of all answers only its own errors are plain text."""
        if start["status"] < 400 or self._scope["path"].startswith(_SERVE_S_PATHS):
            return False
        headers = {name.lower(): value for name, value in start["headers"]}
        return bytes(headers.get(b"content-type", b"")).startswith(b"text/plain")

    def _rewritten(self, start: Message) -> Response:
        outcome = Outcome.SHED if start["status"] == BUSY else Outcome.FAILED
        response = error_response(self._scope, RequestError(outcome, self._reason.decode(errors="replace")))
        response.status_code = start["status"]
        kept = ((name, value) for name, value in start["headers"] if not name.lower().startswith(b"content-"))
        response.raw_headers.extend(kept)
        return response
