"""The FastAPI application around the protocols: errors in one shape, tenants, status pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware

from pliant import __version__
from pliant.config.cluster import GatewayConfig
from pliant.deployments.http import embeddings, hugging_face, open_inference, openai_batches, reranking
from pliant.deployments.http.background import Background
from pliant.deployments.http.console.console import Console, router
from pliant.deployments.http.failures import answer_failures, failed
from pliant.deployments.http.openapi import document
from pliant.deployments.http.places import PROBES, Places, Refused
from pliant.deployments.http.statuses import error_response
from pliant.deployments.http.tenancy import Tenancy
from pliant.deployments.http.tracing import trace_requests
from pliant.deployments.serving.batches.runner import Runner
from pliant.deployments.serving.history import History
from pliant.deployments.serving.keys import Tenants
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.services import Services
from pliant.deployments.serving.tenants import current

_FAULTS = {404: Fault.NOT_FOUND, 405: Fault.METHOD}
"""What is wrong of a request for which the framework finds no route, by its status."""


def application(
    config: GatewayConfig,
    services: Services,
    stats: Callable[[], dict[str, Any]],
    metrics: Callable[[], bytes],
    routers: Sequence[APIRouter] = (),
    tenants: Tenants | None = None,
    refused: Refused = lambda _service, _outcome: None,
    history: History | None = None,
    batches: Runner | None = None,
    occupied: Callable[[float], None] = lambda _share: None,
) -> FastAPI:
    """The gateway's routes: those of protocols that several kinds speak, and `routers` of single kinds; and a console
    that shows `history`, and files of requests that `batches` works on.

    With `tenants`, every path but the health probes works for one of them, or asks for `Authorization: Bearer KEY`.
    `refused` counts requests for which the gateway has no place, and `occupied` hears which share of places is taken.
    """
    app = FastAPI(title="pliant", version=__version__, description="Elastic transformer serving on Ray Serve.")
    app.openapi = document(app, PROBES if tenants and tenants.ask_for_keys else None)  # type: ignore[method-assign]
    max_body = round(config.max_body_mb * 2**20)
    protocols = (hugging_face, open_inference, embeddings, reranking)
    all_routers = [*(each.router(services, max_body, config.max_texts) for each in protocols), *routers]
    if batches and tenants:
        batches.begin(Background(all_routers, tenants).ask)
        all_routers.append(openai_batches.router(batches, max_body))
    if history:
        all_routers.append(router(Console(stats, history)))
    # not include_router: to find a route behind it takes FastAPI several times as long as to find one of the app's own
    app.router.routes.extend(route for each in all_routers for route in each.routes)

    @app.get("/stats", tags=["Status"])
    async def stats_page() -> dict[str, Any]:
        """For people: what each replica holds, how busy it is, what it served and how fast."""
        current().check("observe")
        return stats()

    @app.get("/metrics", tags=["Status"], response_class=PlainTextResponse)
    async def metrics_page() -> Response:
        """The same for Prometheus, as one URL."""
        current().check("observe")
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    answer_failures(app)

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

    names = [service.name for service in services]
    app.add_middleware(Places, config=config, services=names, refused=refused, occupied=occupied)
    if tenants:
        app.add_middleware(ServerErrorMiddleware, handler=failed)  # within: tenants have failures counted, too
        app.add_middleware(Tenancy, tenants=tenants)
    trace_requests(app)
    return app
