"""The spans that are made within a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pliant.deployments.serving import tracing


class Spans:
    """Those that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def named(self, name: str) -> list[ReadableSpan]:
        """In the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def attempts(self) -> list[dict[str, object]]:
        """What each says, in the order in which they began."""
        spans = sorted(self.named("attempt"), key=lambda span: span.start_time or 0)
        return [dict(span.attributes or {}) for span in spans]


@contextmanager
def collected() -> Iterator[Spans]:
    """There are traces within."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.tracer = provider.get_tracer("pliant")
    try:
        yield Spans(exporter)
    finally:
        tracing.tracer = None
