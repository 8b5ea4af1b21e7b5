"""The cluster's serving view for Prometheus: one URL instead of every node's exporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pliant.deployments.serving.kind import Kind


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
        yield GaugeMetricFamily(
            "pliant_planner_reached", "Whether the planner answered of late.", self._stats["planner_reached"]
        )
        yield from _services(self._stats["services"])
        for name, kind in self._kinds.items():
            services = {service: view for service, view in self._stats["services"].items() if view["kind"] == name}
            yield from kind.metrics(services)


def _services(views: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What is said of services of all kinds."""
    labels = ("service", "kind")
    ready = GaugeMetricFamily("pliant_service_ready", "Whether the service can answer.", labels=labels)
    there = GaugeMetricFamily("pliant_service_replicas", "Replicas that the gateway knows.", labels=labels)
    ejected = GaugeMetricFamily("pliant_service_replicas_ejected", "Those that are left alone.", labels=labels)
    problems = GaugeMetricFamily(
        "pliant_service_problems", "Adapters, tasks or promises that need a person.", labels=labels
    )
    for name, view in views.items():
        of = (name, view["kind"])
        ready.add_metric(of, view["ready"])
        there.add_metric(of, len(view["replicas"]))
        ejected.add_metric(of, sum(bool(report.get("ejected")) for report in view["replicas"].values()))
        problems.add_metric(of, len(view.get("problems", ())) + bool(view.get("problem")))
    yield from (ready, there, ejected, problems)
