"""Requests that a gateway sends to itself: whatever becomes of them, there is an answer that can be kept."""

from __future__ import annotations

import pytest
from fastapi import APIRouter, Request, Response
from support.tenants import tenants

from pliant.deployments.http.background import Background
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError


@pytest.fixture
def background() -> Background:
    api = APIRouter()

    @api.post("/v1/{how}")
    async def answer(request: Request, how: str) -> Response:
        if how == "breaks":
            raise KeyError("boom")
        return Response("sorry" if how == "text" else await request.body())

    @api.post("/v1/refused/{fault}")
    async def refuse(fault: str) -> Response:
        raise RequestError(Outcome.SHED, "no", 1.0, Fault(fault))

    return Background([api], tenants(a={}))


async def test_an_answer_is_what_a_client_would_get(background: Background) -> None:
    assert await background.ask("a", "one", "/v1/echo", {"x": [1]}) == (200, {"x": [1]}, False)


async def test_what_nobody_expected_is_answered_in_the_protocol_s_shape(background: Background) -> None:
    reply = await background.ask("a", "one", "/v1/breaks", {})
    assert reply.status == 500
    assert reply.body["error"]["type"] == "server_error"
    assert reply.body["error"]["message"] == "internal error: KeyError; see the log"


async def test_an_answer_that_is_no_json_is_none(background: Background) -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        await background.ask("a", "one", "/v1/text", {})


@pytest.mark.parametrize(("fault", "for_ever"), [(Fault.SHORT_SLO, True), (Fault.EVICTED, False)])
async def test_what_waiting_does_not_mend_is_told_from_what_it_may(
    background: Background, fault: Fault, for_ever: bool
) -> None:
    reply = await background.ask("a", "one", f"/v1/refused/{fault}", {})
    assert reply.status in (429, 503)
    assert reply.for_ever == for_ever
