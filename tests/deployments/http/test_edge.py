"""What strangers send reaches Serve only if it does no harm, and nobody waits for slow readers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
import uvicorn
from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    convert_object_to_asgi_messages,
    validate_http_proxy_callback_return,
)
from starlette.types import Receive, Scope, Send
from support.asgi import Exchange
from support.waiting import until
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from pliant import haproxy
from pliant.deployments.http.edge import Edge, middlewares

Headers = list[tuple[bytes, bytes]]


async def seen(*headers: tuple[bytes, bytes]) -> Headers:
    """What Serve sees of these."""
    found: Headers = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.extend(scope["headers"])

    await Exchange(Edge(app), "/v1/models", "GET", headers).over()
    return found


@pytest.mark.parametrize(
    "header",
    [
        SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        SERVE_MULTIPLEXED_MODEL_ID,
        SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-"),
        SERVE_SESSION_ID,
        "x-request-anything",
    ],
)
async def test_headers_that_serve_obeys_do_not_pass(header: str) -> None:
    accept = (b"accept", b"*/*")
    assert await seen((header.encode(), b"?1"), (header.title().encode(), b"1"), accept) == [accept]


@pytest.mark.parametrize("value", [b"\xff", b"", b"a b", b"a\x7f", b"a" * 129])
async def test_a_request_id_that_cannot_be_printed_does_not_pass(value: bytes) -> None:
    assert await seen((SERVE_HTTP_REQUEST_ID_HEADER.encode(), value)) == []


async def test_one_request_id_passes() -> None:
    name = SERVE_HTTP_REQUEST_ID_HEADER.encode()
    assert await seen((name, b"\xff"), (name.title(), b"7-a"), (name, b"8")) == [(name, b"7-a")]


async def test_traces_pass_if_they_are_text() -> None:
    good = (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    assert await seen(good, (b"tracestate", b"\xff")) == [good]


async def refused(path: str, status: int, *headers: tuple[bytes, bytes]) -> Exchange:
    """What clients see where Serve itself answers."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        for message in convert_object_to_asgi_messages("dropped", status, list(headers)):
            await send(message)

    return await Exchange(Edge(RequestIdMiddleware(serve)), path, "GET").over()


@pytest.mark.parametrize(
    ("path", "said", "status"),
    [("/stats", b"sesame", 200), ("/stats", b"other", 403), ("/stats", None, 403), ("/-/healthz", None, 200)],
)
async def test_a_gateway_behind_haproxy_answers_nobody_else(path: str, said: bytes | None, status: int) -> None:
    seen: Headers = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])
        for message in convert_object_to_asgi_messages("fine", 200):
            await send(message)

    headers = [] if said is None else [(haproxy.PASSWORD_HEADER.encode(), said)]
    answer = await Exchange(Edge(app, password="sesame"), path, "GET", headers).over()
    assert (answer.status, seen) == (status, [])


async def test_serve_s_refusals_are_json() -> None:
    answer = await refused("/models/topics", 429, (b"retry-after", b"2"))
    assert (answer.status, answer.json()) == (429, {"error": "dropped"})
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]


async def test_serve_s_refusals_are_openai_s_where_that_is_spoken() -> None:
    answer = await refused("/v1/chat/completions", 429)
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await refused("/v1/models", 408)).status == 408


async def test_serve_s_health_page_stays_as_it_is() -> None:
    assert (await refused("/-/healthz", 503)).body == b"dropped"


async def test_answers_pass() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a" * 200_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    answer = await Exchange(Edge(app), "/v1/load_lora_adapter").over()
    assert answer.body == b"a" * 200_000 + b"b"


class Recorder:
    """A transport that remembers what is written to it at a time."""

    def __init__(self, transport: asyncio.Transport, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)


@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.1", b"HEAD / HTTP/1.1", b"GET / HTTP/1.0"])
@pytest.mark.parametrize("bodies", [[b"all"], [b"first", b"second", b""], [b""]])
async def test_the_head_leaves_with_the_first_part_of_the_body(request_line: bytes, bodies: list[bytes]) -> None:
    """With the server that Serve has: between two writes its process may die, and then nobody could be asked again."""
    writes: list[bytes] = []

    class Recorded(AutoHTTPProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(Recorder(cast(asyncio.Transport, transport), writes))  # type: ignore[arg-type]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
        await asyncio.sleep(0)
        for number, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Edge(app), lifespan="off", log_config=None, http=Recorded))
    serving = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(request_line + b"\r\nHost: a\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    server.should_exit = True
    await serving
    assert b"".join(writes) == answer
    assert b"x-a: b\r\n" in writes[0]
    if not request_line.startswith(b"HEAD"):
        assert writes[0].partition(b"\r\n\r\n")[2].strip(b"\r\n0123456789") == bodies[0]
        assert len([write for write in writes if write]) == len(bodies)


@pytest.mark.parametrize("parts", [1, None], ids=["one large answer", "a stream"])
async def test_who_does_not_read_is_cut_off(parts: int | None) -> None:
    """With the server that Serve has. The one who writes waits until then, so that nothing piles up."""
    written = 0
    cancelled = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal written
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done() and written != parts:
            await send({"type": "http.response.body", "body": b"a" * 2**24, "more_body": True})
            written += 1
        await gone
        cancelled.set()

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Edge(app, write_within_s=0.2), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(cancelled.is_set)
    assert written <= 2
    server.should_exit = True
    await serving


@pytest.mark.parametrize("password", [None, "sesame"])
def test_serve_takes_the_middleware(monkeypatch: pytest.MonkeyPatch, password: str | None) -> None:
    if password:
        monkeypatch.setenv(haproxy.PASSWORD, password)
    [made] = validate_http_proxy_callback_return(middlewares())
    assert (made.cls, made.kwargs) == (Edge, {"password": password})
