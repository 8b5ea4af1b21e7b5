"""OpenTelemetry spans of requests, for all kinds: where they go, and the two sorts that the call path begins.

`http.tracing` begins the span of a request. Below it are a `choose` for each time that a replica is chosen, which takes
as long as the request waits for one, and an `attempt` for each replica that is asked. The replica's own spans are below
that. Where nobody wants traces, `tracer` is None and nothing is made.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from pliant import traces
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.way import Step, steps_wanted

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger("pliant")

Attributes = Mapping[str, str | int | float | bool]
COMPUTE_MS: Final = "pliant.compute_ms"
"""What of an attempt was computing; the rest of it is the queue, and the way there and back."""
PROMPT_MS: Final = "pliant.prompt_ms"
"""What of the time to an attempt's first piece was computing; the rest of it is the queue, and the way."""

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


def choosing() -> AbstractContextManager[Any]:
    """To be entered while a replica is chosen."""
    way = steps_wanted()
    if tracer is None and way is None:
        return nullcontext()
    return _choosing(way)


@contextmanager
def _choosing(way: list[Step] | None) -> Iterator[None]:
    began = time.monotonic()
    with tracer.start_span("choose") if tracer else nullcontext():
        yield
    if way is not None:
        way.append(Step("choose", time.monotonic() - began))


class Trial:
    """What one replica that is asked does about it, for a trace, for whoever asked for the `way`, or for both. `facts`
    says what an answer says of itself."""

    def __init__(
        self, span: Span | None, way: list[Step] | None, asked: str, facts: Callable[[Any], Attributes]
    ) -> None:
        self._span = span if span and span.is_recording() else None
        self._way = way
        self._asked = asked
        self._facts = facts
        self._began = time.monotonic()
        self._begun = self._over = False

    @property
    def parent(self) -> str:
        """What the replica's spans belong to, as a W3C traceparent; empty: they are not wanted."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def got(self, piece: Any) -> None:
        """A `piece` of the answer came, the first perhaps."""
        if self._begun:
            return
        self._begun = True
        if self._span:
            self._span.add_event("first piece")
        if self._way is None:
            return
        took_s = time.monotonic() - self._began
        self._note("first", took_s, self._asked)
        if (prompt_ms := self._facts(piece).get(PROMPT_MS)) is not None:
            self._note_parts(took_s, "prompt", float(prompt_ms) / 1e3)

    def over(self, reply: Any) -> None:
        """It ended with `reply`: an answer or its last piece, a refusal, or an exception; None: nobody waits any more.

        Only the first call counts.
        """
        if self._over:
            return
        self._over = True
        took_s = time.monotonic() - self._began
        outcome, said = self._ended(reply)
        if self._span:
            self._span.set_attributes({**said, "pliant.outcome": outcome})
            self._span.end()
        if self._way is None:
            return
        timed = (COMPUTE_MS, PROMPT_MS)
        details = (f"{name.rpartition('.')[2]} {value}" for name, value in said.items() if name not in timed)
        self._note("attempt", took_s, "; ".join((f"{self._asked} {outcome}", *details)))
        if (compute_ms := said.get(COMPUTE_MS)) is not None:
            self._note_parts(took_s, "compute", float(compute_ms) / 1e3)

    def _ended(self, reply: Any) -> tuple[str, Attributes]:
        if reply is None:
            return "left", {}
        if isinstance(reply, Refusal):
            return str(reply.cause), {"pliant.reason": reply.reason}
        if isinstance(reply, Exception):
            return "lost", {"pliant.reason": str(reply) or type(reply).__name__}
        return "answered", self._facts(reply)

    def _note_parts(self, took_s: float, name: str, computing_s: float) -> None:
        """Of what `took_s` seconds, so many were computing; before that was the queue."""
        self._note("queue", max(0.0, took_s - computing_s))
        self._note(name, computing_s)

    def _note(self, name: str, seconds: float, about: str = "") -> None:
        if self._way is not None:
            self._way.append(Step(name, seconds, about))


def trial(subject: str, replica: str, retry: str | None, facts: Callable[[Any], Attributes]) -> Trial | None:
    """Begins what is said of asking `replica` for `subject`, a `retry` if that is why; None: nobody wants any."""
    way = steps_wanted()
    if tracer is None and way is None:
        return None
    attributes = {"pliant.subject": subject, "pliant.replica": replica}
    if retry:
        attributes["pliant.retry"] = retry
    span = tracer.start_span("attempt", attributes=attributes) if tracer else None
    return Trial(span, way, f"{replica} of {subject}", facts)


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
