"""The FastAPI application around the protocols: errors in one shape, API keys, status pages."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from pliant import __version__
from pliant.config.cluster import GatewayConfig
from pliant.deployments.http import hugging_face, open_inference
from pliant.deployments.http.openai_errors import error_response, speaks_openai
from pliant.deployments.serving.errors import RequestError
from pliant.deployments.serving.services import Services

_OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""What load balancers probe without a key."""


def application(
    config: GatewayConfig,
    services: Services,
    stats: Callable[[], dict[str, Any]],
    metrics: Callable[[], bytes],
    routers: Sequence[APIRouter] = (),
    api_keys: Collection[str] = (),
) -> FastAPI:
    """The gateway's routes: those of protocols that several kinds speak, and `routers` of single kinds.

    With `api_keys`, every path but the health probes asks for `Authorization: Bearer KEY`.
    """
    app = FastAPI(title="pliant", version=__version__, description="Elastic transformer serving on Ray Serve.")
    max_body = round(config.max_body_mb * 2**20)
    for router in routers:
        app.include_router(router)
    app.include_router(open_inference.router(services, max_body, config.max_texts))
    app.include_router(hugging_face.router(services, max_body, config.max_texts))

    @app.get("/stats", tags=["Status"])
    async def stats_page() -> dict[str, Any]:
        """For people: what each replica holds, how busy it is, what it served and how fast."""
        return stats()

    @app.get("/metrics", tags=["Status"])
    async def metrics_page() -> Response:
        """The same for Prometheus, as one URL."""
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return _response(request.scope, error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = _response(
            request.scope, RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        )
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(request.scope, RequestError(400, "; ".join(str(item["msg"]) for item in error.errors())))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        reason = f"internal error: {type(error).__name__}; the log tells more"
        return _response(request.scope, RequestError(500, reason))

    if api_keys:
        app.add_middleware(_ApiKeys, keys=api_keys)
    return app


def _response(scope: Scope, error: RequestError) -> Response:
    """`error` in the shape of the protocol that the client of this request speaks."""
    if speaks_openai(scope):
        return error_response(error)
    return JSONResponse({"error": error.reason}, error.status, error.headers)


def _path(scope: Scope) -> str:
    """The request's path below the application's route prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


class _ApiKeys:
    """Answers 401 unless the request carries one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _path(scope) not in _OPEN_PATHS and not self._allowed(scope):
            refusal = _response(scope, RequestError(401, "no valid API key; send one as 'Authorization: Bearer KEY'"))
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)
