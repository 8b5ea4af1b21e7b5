"""OpenTelemetry spans of requests, for all kinds: where they go, and the two sorts that the call path begins.

`http.tracing` begins the span of a request. Below it are a `choose` for each time that a replica is chosen, which takes
as long as the request waits for one, and an `attempt` for each replica that is asked. The replica's own spans are below
that. Where nobody wants traces, `tracer` is None and nothing is made.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pliant import traces
from pliant.deployments.serving.parcels import Refusal

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger("pliant")

Attributes = Mapping[str, str | int | float | bool]

tracer: Tracer | None = None
"""Makes the spans of this process; None: nobody wants any."""


def start() -> None:
    """Send the spans of this process where OpenTelemetry's environment variables say, if they say so."""
    global tracer
    if tracer or not traces.wanted():
        return
    if problem := traces.problem():
        logger.warning(problem)
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = os.environ.get("OTEL_SERVICE_NAME", "pliant")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: named}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("pliant")


class Trial:
    """The span of one replica that is asked. `facts` says what an answer says of itself."""

    def __init__(self, span: Span, facts: Callable[[Any], Attributes]) -> None:
        self._span = span
        self._facts = facts
        self._begun = False

    @property
    def parent(self) -> str:
        """What the replica's spans belong to, as a W3C traceparent; empty: they are not wanted."""
        context = self._span.get_span_context()
        if not self._span.is_recording():
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def got(self) -> None:
        """A piece of the answer came, the first perhaps."""
        if not self._begun:
            self._begun = True
            self._span.add_event("first piece")

    def over(self, reply: Any) -> None:
        """It ended with `reply`: an answer or its last piece, a refusal, or an exception; None: nobody waits any more.

        Only the first call counts.
        """
        if not self._span.is_recording():
            return
        if reply is None:
            outcome = "left"
        elif isinstance(reply, Refusal):
            outcome = str(reply.cause)
            self._span.set_attribute("pliant.reason", reply.reason)
        elif isinstance(reply, Exception):
            outcome = "lost"
            self._span.set_attribute("pliant.reason", str(reply) or type(reply).__name__)
        else:
            outcome = "answered"
            self._span.set_attributes(self._facts(reply))
        self._span.set_attribute("pliant.outcome", outcome)
        self._span.end()


def trial(subject: str, replica: str, retry: str | None, facts: Callable[[Any], Attributes]) -> Trial | None:
    """Begins the span of asking `replica` for `subject`, which is a `retry` if that is why; None: nobody wants any."""
    if tracer is None:
        return None
    attributes = {"pliant.subject": subject, "pliant.replica": replica}
    if retry:
        attributes["pliant.retry"] = retry
    return Trial(tracer.start_span("attempt", attributes=attributes), facts)


class Work:
    """The span of a replica that works on a query, and below it those of its parts, one after the other."""

    def __init__(self, tracer: Tracer, service: str, trace: str) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": trace})
        self._tracer = tracer
        self._span = tracer.start_span("replica", parent, attributes={"pliant.subject": service})
        self._below = set_span_in_context(self._span)
        self._since = time.time_ns()

    def part(self, name: str, but_s: float = 0.0, attributes: Attributes | None = None) -> None:
        """What it has done since the last part, up to `but_s` seconds ago."""
        until = max(self._since, time.time_ns() - round(but_s * 1e9))
        span = self._tracer.start_span(name, self._below, attributes=attributes, start_time=self._since)
        span.end(until)
        self._since = until

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        """It works on it no more."""
        self._span.end()


def work(service: str, trace: str) -> Work | None:
    """Begins the span of a replica of `service`, below that of `trace`; None: nobody wants any."""
    return Work(tracer, service, trace) if tracer and trace else None
