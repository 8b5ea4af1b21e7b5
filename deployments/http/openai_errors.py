"""Errors in OpenAI's shape, under every path that begins with /v1."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Scope

from pliant.deployments.serving.errors import RequestError

_PREFIX = "/v1"
_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 413: "request_too_large", 503: "service_unavailable"}


class OpenAIError(RequestError):
    """A RequestError that names the parameter that is wrong, and has a code for programs."""

    def __init__(self, status: int, reason: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, reason)
        self.param = param
        self.code = code


def speaks_openai(scope: Scope) -> bool:
    """Whether the client of this HTTP request expects errors in OpenAI's shape."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == _PREFIX or path.startswith(f"{_PREFIX}/")


def error_body(error: RequestError) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else _TYPES.get(error.status, "invalid_request_error")
    code = getattr(error, "code", None) or _CODES.get(error.status)
    param = getattr(error, "param", None)
    return {"error": {"message": error.reason, "type": kind, "param": param, "code": code}}


def error_response(error: RequestError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status, error.headers)
