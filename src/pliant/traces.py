"""Whether the environment asks for traces, and whether this machine can send them."""

from __future__ import annotations

import importlib.util
import os

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = "opentelemetry.exporter.otlp"
_MISSING = "an OTLP endpoint is set, but no traces are sent; run: pip install 'pliant[traces]'"


def wanted() -> bool:
    """Whether the environment names a collector, and does not turn traces off."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not off and any(map(os.environ.get, ENDPOINTS))


def problem() -> str | None:
    """Why no traces are sent though they are wanted, and what to do about it."""
    if not wanted() or (importlib.util.find_spec(_EXPORTERS) and importlib.util.find_spec(f"{_EXPORTERS}.proto.http")):
        return None
    return _MISSING
