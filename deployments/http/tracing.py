"""The span of an HTTP request, which goes on with the trace that its `traceparent` names."""

from __future__ import annotations

from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pliant.deployments.http.places import PROBES
from pliant.deployments.http.statuses import below_root
from pliant.deployments.serving import tracing

_CONTEXT = TraceContextTextMapPropagator()
_FAILED = 500


def trace_requests(app: FastAPI) -> None:
    """Have all that `app` answers traced, if there are traces."""
    if tracing.tracer:
        app.add_middleware(Tracing, tracer=tracing.tracer)


class Tracing:
    """ASGI middleware: all that `app` does for a request is below one span, but for health probes."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or below_root(scope) in PROBES:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        if "x-request-id" in headers:
            attributes["pliant.request_id"] = headers["x-request-id"]
        span = self._tracer.start_span(scope["method"], _CONTEXT.extract(headers), SpanKind.SERVER, attributes)

        async def traced_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= _FAILED:
                    span.set_status(trace.StatusCode.ERROR)
            await send(message)

        with trace.use_span(span, end_on_exit=True):
            await self._app(scope, receive, traced_send)
            if route := scope.get("route"):
                span.update_name(f"{scope['method']} {route.path}")
                span.set_attribute("http.route", route.path)
