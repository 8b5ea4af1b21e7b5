"""Log lines are written as Serve writes its own, and each says the request that it is about."""

from __future__ import annotations

import errno
import io
import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from ray._common.formatters import JSONFormatter
from ray.serve._private.logging_utils import ServeContextFilter, ServeFormatter
from ray.serve.context import _set_request_context
from support.echo.config import EchoConfig
from support.echo.kind import ECHO
from support.local_serve import LocalCluster

from pliant.config.cluster import Reader
from pliant.deployments.kinds import CONFIGS, KINDS, loaded
from pliant.deployments.serving import logs


@pytest.fixture(params=["TEXT", "JSON"])
def written(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What Serve writes, in the form that cluster.yaml asked for."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(ServeContextFilter())
    handler.setFormatter(JSONFormatter() if request.param == "JSON" else ServeFormatter("pliant_topics", "r1"))
    serve_s = logging.getLogger("ray.serve")
    before, serve_s.handlers = serve_s.handlers, [handler]
    try:
        yield out
    finally:
        serve_s.handlers = before


def about(line: str, request: str) -> bool:
    """Whether it says that it is about `request`."""
    return json.loads(line).get("request_id", "") == request if line.startswith("{") else f" {request} " in line


async def test_replicas_and_the_gateway_say_which_request_failed(written: io.StringIO) -> None:
    config = Reader((*CONFIGS, EchoConfig)).parse({"services": {"echo": {"kind": "echo", "replicas": 1}}})
    app = await LocalCluster(config, loaded((*KINDS, ECHO))).gateway()
    body = {"inputs": ["raise", "this is answered", "raise"]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        assert (await http.post("/models/echo", json=body, headers={"x-request-id": "mine"})).status_code == 503
    lines = written.getvalue().splitlines()
    for said in ("echo: a query broke down", "echo: replica echo-0 failed a request"):
        assert [about(line, "mine") for line in lines if said in line] != []
        assert all(about(line, "mine") for line in lines if said in line)


def test_a_line_of_no_request_says_none_and_one_of_a_request_not_the_call_s(written: io.StringIO) -> None:
    logs.start()
    logs.start()
    _set_request_context(request_id="of-the-call")
    logger = logging.getLogger("pliant")
    logger.info("the cluster's")
    logs.work_on("mine")
    logger.info("a request's")
    logs.work_on("")
    of_nobody, of_one = written.getvalue().splitlines()  # and none of them twice
    assert "of-the-call" not in of_nobody
    assert about(of_one, "mine")


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_whoever_logs_a_line_and_nothing_else(written: io.StringIO) -> None:
    logs.start()
    logging.getLogger("ray.serve").handlers.insert(0, logging.StreamHandler(FullDisk()))
    logging.getLogger("pliant").warning("it goes on")
    assert "it goes on" in written.getvalue()


def test_what_serve_leaves_out_is_left_out(written: io.StringIO) -> None:
    logs.start()
    logging.getLogger("pliant").debug("nobody asked for this")
    assert written.getvalue() == ""
