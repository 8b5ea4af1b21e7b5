"""The cluster's serving view for Prometheus: one URL instead of every node's exporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS = ("service", "replica", "runtime")
_GAUGES = {
    "max_length": (
        "pliant_runtime_max_length_tokens",
        "The input length that the replica holds; 0 while it switches.",
        1,
    ),
    "waiting": ("pliant_requests_waiting", "Requests queued or running in the replica.", 1),
    "service_s": ("pliant_service_time_seconds", "What one request takes on this runtime.", 1),
    "p50_ms": ("pliant_replica_latency_p50_seconds", "Median latency of recent requests within the replica.", 1e-3),
    "p98_ms": ("pliant_replica_latency_p98_seconds", "98th percentile of the same.", 1e-3),
}


def exposition(stats: Mapping[str, Any]) -> bytes:
    """`stats` in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._replicas = [
            ((service, replica, str(report["max_length"])), report)
            for service, view in stats["services"].items()
            for replica, report in view["replicas"].items()
        ]

    def collect(self) -> Iterator[Metric]:
        for key, (name, description, unit) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, description, labels=_LABELS)
            for labels, report in self._replicas:
                gauge.add_metric(labels, report[key] * unit)
            yield gauge
        served = CounterMetricFamily(
            "pliant_requests_served", "Requests that the replica has answered.", labels=_LABELS
        )
        for labels, report in self._replicas:
            served.add_metric(labels, report["served"])
        yield served
