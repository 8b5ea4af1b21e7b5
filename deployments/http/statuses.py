"""What a client is sent for a request that ends without an answer: one table for each protocol, of statuses and shapes.

A row is of an outcome, or of a fault where that has a status or a code of its own. OpenAI's shape is under every path
that begins with /v1, and on those that vLLM has beside them.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from fastapi.responses import JSONResponse
from starlette.types import Scope

from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

BUSY: Final = 429
"""Also of Serve itself, when a gateway is full before a request reaches it."""

STATUSES: dict[Outcome | Fault, int] = {
    Outcome.REJECTED: 400,
    Fault.UNAUTHORIZED: 401,
    Fault.FORBIDDEN: 403,
    Fault.NOT_FOUND: 404,
    Fault.MODEL_NOT_FOUND: 404,
    Fault.METHOD: 405,
    Fault.SLOW_BODY: 408,
    Fault.CONFLICT: 409,
    Fault.TOO_LARGE: 413,
    Fault.MEDIA_TYPE: 415,
    Fault.TOO_LONG: 422,
    Outcome.SHED: BUSY,
    Fault.EVICTED: 503,
    Outcome.TOO_LATE: 504,
    Fault.SHORT_SLO: BUSY,
    Outcome.UNAVAILABLE: 503,
    Outcome.FAILED: 500,
}
"""Of the Open Inference Protocol, Hugging Face's shape and pages of our own: `{"error": REASON}`."""


class OpenAI(NamedTuple):
    """A status, and what OpenAI's error object says beside reason and parameter."""

    status: int
    type: str
    code: str | None = None


OPENAI: dict[Outcome | Fault, OpenAI] = {
    Outcome.REJECTED: OpenAI(400, "invalid_request_error"),
    Fault.CONTEXT_LENGTH: OpenAI(400, "invalid_request_error", "context_length_exceeded"),
    Fault.ADAPTER_TOO_LARGE: OpenAI(400, "invalid_request_error", "adapter_too_large"),
    Fault.UNKNOWN_PARAMETER: OpenAI(400, "invalid_request_error", "unknown_parameter"),
    Fault.MISSING_PARAMETER: OpenAI(400, "invalid_request_error", "missing_required_parameter"),
    Fault.UNAUTHORIZED: OpenAI(401, "authentication_error", "invalid_api_key"),
    Fault.FORBIDDEN: OpenAI(403, "permission_error"),
    Fault.NOT_FOUND: OpenAI(404, "invalid_request_error"),
    Fault.MODEL_NOT_FOUND: OpenAI(404, "invalid_request_error", "model_not_found"),
    Fault.METHOD: OpenAI(405, "invalid_request_error"),
    Fault.SLOW_BODY: OpenAI(408, "timeout_error"),
    Fault.CONFLICT: OpenAI(409, "invalid_request_error"),
    Fault.TOO_LARGE: OpenAI(413, "invalid_request_error", "request_too_large"),
    Fault.MEDIA_TYPE: OpenAI(415, "invalid_request_error"),
    Fault.TOO_LONG: OpenAI(422, "invalid_request_error"),
    Outcome.SHED: OpenAI(BUSY, "rate_limit_error", "rate_limit_exceeded"),
    Fault.QUOTA: OpenAI(BUSY, "insufficient_quota", "insufficient_quota"),
    Fault.EVICTED: OpenAI(503, "server_error", "service_unavailable"),
    Outcome.TOO_LATE: OpenAI(504, "server_error"),
    Fault.SHORT_SLO: OpenAI(BUSY, "rate_limit_error", "rate_limit_exceeded"),
    Outcome.UNAVAILABLE: OpenAI(503, "server_error", "service_unavailable"),
    Fault.ADAPTER_NOT_LOADABLE: OpenAI(503, "server_error", "adapter_not_loadable"),
    Outcome.FAILED: OpenAI(500, "server_error"),
}

_MOST_REASON = 2_000
"""Characters: what was wrong may be as long as a body."""
_OPENAI_PREFIX = "/v1"
_VLLM_PATHS = ("/tokenize", "/detokenize")


def error_response(scope: Scope, error: RequestError) -> JSONResponse:
    """`error` as the protocol has it that the client of this HTTP request speaks."""
    wait_s = error.retry_after_s
    headers = {} if wait_s is None else {"Retry-After": str(max(1, math.ceil(wait_s)))}
    if speaks_openai(scope):
        return JSONResponse(openai_body(error), _openai(error).status, headers)
    status = STATUSES.get(error.fault or error.outcome) or STATUSES[error.outcome]
    return JSONResponse({"error": _reason(error)}, status, headers)


def openai_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object, which may also be an event of a stream."""
    row = _openai(error)
    return {"error": {"message": _reason(error), "type": row.type, "param": error.param, "code": row.code}}


def _reason(error: RequestError) -> str:
    return error.reason if len(error.reason) <= _MOST_REASON else f"{error.reason[:_MOST_REASON]}..."


def _openai(error: RequestError) -> OpenAI:
    return OPENAI.get(error.fault or error.outcome) or OPENAI[error.outcome]


def speaks_openai(scope: Scope) -> bool:
    """Whether the client of this HTTP request expects errors in OpenAI's shape."""
    path = below_root(scope)
    return path == _OPENAI_PREFIX or path.startswith(f"{_OPENAI_PREFIX}/") or path in _VLLM_PATHS


def below_root(scope: Scope) -> str:
    """The request's path below the application's route prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
