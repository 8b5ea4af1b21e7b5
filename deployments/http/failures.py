"""What ends a request without an answer, in the shape of the protocol that its client speaks."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from pliant.deployments.http.statuses import error_response
from pliant.deployments.serving.outcome import Outcome, RequestError


def answer_failures(app: FastAPI) -> None:
    """Have `app` say what was wrong with a request, and of what nobody expected that it is in the log."""

    @app.exception_handler(RequestError)
    async def ended(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(request.scope, error)

    app.add_exception_handler(Exception, failed)


async def failed(request: Request, error: Exception) -> Response:
    """What is answered when something broke; `error` is for the log."""
    reason = f"internal error: {type(error).__name__}; see the log"
    return error_response(request.scope, RequestError(Outcome.FAILED, reason))
