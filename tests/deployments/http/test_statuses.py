"""What clients of each protocol get for each way in which a request ends without an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from pliant.deployments.http.statuses import OPENAI, STATUSES, error_response
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

INVALID, BUSY, BROKEN = "invalid_request_error", "rate_limit_error", "server_error"
TABLE: list[tuple[Outcome, Fault | None, int, tuple[int, str, str | None]]] = [
    (Outcome.REJECTED, None, 400, (400, INVALID, None)),
    (Outcome.REJECTED, Fault.CONTEXT_LENGTH, 400, (400, INVALID, "context_length_exceeded")),
    (Outcome.REJECTED, Fault.ADAPTER_TOO_LARGE, 400, (400, INVALID, "adapter_too_large")),
    (Outcome.REJECTED, Fault.UNKNOWN_PARAMETER, 400, (400, INVALID, "unknown_parameter")),
    (Outcome.REJECTED, Fault.MISSING_PARAMETER, 400, (400, INVALID, "missing_required_parameter")),
    (Outcome.REJECTED, Fault.UNAUTHORIZED, 401, (401, "authentication_error", "invalid_api_key")),
    (Outcome.REJECTED, Fault.FORBIDDEN, 403, (403, "permission_error", None)),
    (Outcome.REJECTED, Fault.NOT_FOUND, 404, (404, INVALID, None)),
    (Outcome.REJECTED, Fault.MODEL_NOT_FOUND, 404, (404, INVALID, "model_not_found")),
    (Outcome.REJECTED, Fault.METHOD, 405, (405, INVALID, None)),
    (Outcome.REJECTED, Fault.SLOW_BODY, 408, (408, "timeout_error", None)),
    (Outcome.REJECTED, Fault.CONFLICT, 409, (409, INVALID, None)),
    (Outcome.REJECTED, Fault.TOO_LARGE, 413, (413, INVALID, "request_too_large")),
    (Outcome.REJECTED, Fault.MEDIA_TYPE, 415, (415, INVALID, None)),
    (Outcome.REJECTED, Fault.TOO_LONG, 422, (422, INVALID, None)),
    (Outcome.SHED, None, 429, (429, BUSY, "rate_limit_exceeded")),
    (Outcome.SHED, Fault.QUOTA, 429, (429, "insufficient_quota", "insufficient_quota")),
    (Outcome.SHED, Fault.EVICTED, 503, (503, BROKEN, "service_unavailable")),
    (Outcome.TOO_LATE, None, 504, (504, BROKEN, None)),
    (Outcome.TOO_LATE, Fault.SHORT_SLO, 429, (429, BUSY, "rate_limit_exceeded")),
    (Outcome.UNAVAILABLE, None, 503, (503, BROKEN, "service_unavailable")),
    (Outcome.UNAVAILABLE, Fault.DOWN, 503, (503, BROKEN, "service_unavailable")),
    (Outcome.UNAVAILABLE, Fault.TIMED_OUT, 503, (503, BROKEN, "service_unavailable")),
    (Outcome.UNAVAILABLE, Fault.ADAPTER_NOT_LOADABLE, 503, (503, BROKEN, "adapter_not_loadable")),
    (Outcome.FAILED, None, 500, (500, BROKEN, None)),
]


def content(response: JSONResponse) -> Any:
    return json.loads(bytes(response.body))


@pytest.mark.parametrize(("outcome", "fault", "status", "openai"), TABLE)
def test_each_protocol_has_its_status_and_shape(
    outcome: Outcome, fault: Fault | None, status: int, openai: tuple[int, str, str | None]
) -> None:
    error = RequestError(outcome, "so it is", fault=fault, param="prompt")
    plain = error_response({"path": "/models/topics"}, error)
    assert (plain.status_code, content(plain)) == (status, {"error": "so it is"})
    said = error_response({"path": "/v1/models"}, error)
    told = {"message": "so it is", "type": openai[1], "param": "prompt", "code": openai[2]}
    assert (said.status_code, content(said)) == (openai[0], {"error": told})


def test_nothing_is_left_out() -> None:
    answered = {Outcome.OK, Outcome.DEGRADED, Outcome.CANCELLED}
    assert {outcome for outcome, *_ in TABLE} == set(Outcome) - answered
    assert {fault for _, fault, *_ in TABLE if fault} == set(Fault)
    assert len(TABLE) == len({fault or outcome for outcome, fault, *_ in TABLE}), "a fault is of one outcome"
    assert STATUSES.keys() | OPENAI.keys() <= {fault or outcome for outcome, fault, *_ in TABLE}


@pytest.mark.parametrize(("wait_s", "header"), [(None, None), (0, "1"), (0.01, "1"), (1.2, "2"), (7, "7")])
def test_when_to_come_back_is_told_in_whole_seconds(wait_s: float | None, header: str | None) -> None:
    error = RequestError(Outcome.SHED, "busy", wait_s)
    for path in ("/models/topics", "/v1/models"):
        assert error_response({"path": path}, error).headers.get("Retry-After") == header
