"""What ends a request without an answer, in the shape of the protocol that its client speaks."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from pliant.deployments.http.statuses import error_response
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

_FAULT = "pliant.fault"


def answer_failures(app: FastAPI) -> None:
    """Have `app` say what was wrong with a request, and of what nobody expected that it is in the log."""

    @app.exception_handler(RequestError)
    async def ended(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        request.scope[_FAULT] = error.fault
        return error_response(request.scope, error)

    app.add_exception_handler(Exception, failed)


def fault_of(scope: Scope) -> Fault | None:
    """What was wrong with the HTTP request that ended without an answer, as far as that has a name."""
    fault: Fault | None = scope.get(_FAULT)
    return fault


async def failed(request: Request, error: Exception) -> Response:
    """What is answered when something broke; `error` is for the log."""
    reason = f"internal error: {type(error).__name__}; see the log"
    return error_response(request.scope, RequestError(Outcome.FAILED, reason))
