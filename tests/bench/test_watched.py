"""The viewers and the collector of spans that the router's comparison has, and what sends spans to it."""

from __future__ import annotations

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pliant.bench.load import LoadError, session
from pliant.bench.router.apps import ours, traced
from pliant.bench.router.watched import VIEWERS, collector, watched


async def test_viewers_look_until_the_end() -> None:
    looking = []

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        looking.append(request)
        return response

    app = web.Application()
    app.router.add_get("/ours/console/stream", stream)
    async with TestServer(app) as server, session() as http:
        async with watched(http, str(server.make_url("/ours"))):
            assert len(looking) == VIEWERS
        with pytest.raises(LoadError, match="404"):
            async with watched(http, str(server.make_url("/bare"))):
                pass


async def test_a_collector_takes_what_comes() -> None:
    with collector() as spans:
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{spans.address}/v1/traces", content=b"12345")).status_code == 200
        await spans.some()
        assert spans.received == 5


def test_the_gateway_and_the_replicas_of_a_traced_application_send_spans() -> None:
    plain, sending = (ours("zoo/topics-large", 3, 0.05, "topics") for _ in range(2))
    traced(sending, "http://127.0.0.1:1")
    for application, sends in ((plain, False), (sending, True)):
        gateway = application._bound_deployment
        _, _, services, planner, _ = gateway.init_args  # type: ignore[misc]
        for each in (gateway, services["topics"]._bound_deployment):
            assert each.ray_actor_options["num_cpus"] == 0.05
            environment = each.ray_actor_options.get("runtime_env", {}).get("env_vars", {})
            assert environment == ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"} if sends else {})
        assert planner._bound_deployment.init_args[2]["topics"] is services["topics"]
