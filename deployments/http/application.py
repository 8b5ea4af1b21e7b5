"""The FastAPI application around the protocols: errors in one shape, API keys, status pages."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from pliant import __version__
from pliant.config.cluster import GatewayConfig
from pliant.deployments.http import hugging_face, open_inference
from pliant.deployments.http.places import PROBES, Places
from pliant.deployments.http.statuses import below_root, error_response
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.services import Services

_FAULTS = {404: Fault.NOT_FOUND, 405: Fault.METHOD}
"""What is wrong of a request for which the framework finds no route, by its status."""


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
        return error_response(request.scope, error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = f"{request.method} {request.url.path}: {error.detail}"
        fault = _FAULTS.get(error.status_code)
        response = error_response(request.scope, RequestError(Outcome.REJECTED, reason, fault=fault))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        reason = "; ".join(str(item["msg"]) for item in error.errors())
        return error_response(request.scope, RequestError(Outcome.REJECTED, reason))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        reason = f"internal error: {type(error).__name__}; see the log"
        return error_response(request.scope, RequestError(Outcome.FAILED, reason))

    app.add_middleware(Places, config=config, services=len(list(services)))
    if api_keys:
        app.add_middleware(_ApiKeys, keys=api_keys)
    return app


class _ApiKeys:
    """Refuses a request unless it carries one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and below_root(scope) not in PROBES and not self._allowed(scope):
            reason = "no valid API key; send one as 'Authorization: Bearer KEY'"
            refusal = error_response(scope, RequestError(Outcome.REJECTED, reason, fault=Fault.UNAUTHORIZED))
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)
