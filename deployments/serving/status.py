"""The cluster's serving view for Prometheus: one URL instead of every node's exporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pliant.deployments.serving.kind import Kind
from pliant.deployments.serving.metrics import stats_metrics


def exposition(stats: Mapping[str, Any], kinds: Mapping[str, Kind[Any]]) -> bytes:
    """`stats`, as "/stats" has it, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats, kinds))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, stats: Mapping[str, Any], kinds: Mapping[str, Kind[Any]]) -> None:
        self._stats = stats
        self._kinds = kinds

    def collect(self) -> Iterator[Metric]:
        yield from stats_metrics(self._stats)
        for name, kind in self._kinds.items():
            services = {service: view for service, view in self._stats["services"].items() if view["kind"] == name}
            yield from kind.metrics(services)
