"""The serving view of language models and their adapters for Prometheus, from what replicas report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from pliant.deployments.llm.metric_tables import ADAPTERS, CLASSES, EVICTIONS, PREDICTOR, REPLICA, RESIDENT, of_replica
from pliant.deployments.serving.metric_families import Rows, families, family, replicas_of


def llm_metrics(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What "/stats" says of language models and adapters, for Prometheus."""
    replicas = replicas_of(stats["language_models"])
    yield from families(REPLICA, [(labels, of_replica(report)) for labels, report in replicas])
    yield from families(PREDICTOR, [(labels, report["predictor"]) for labels, report in replicas])
    adapters = [(labels, report["adapters"]) for labels, report in replicas]
    yield from families(ADAPTERS, adapters)
    resident, evictions = family(RESIDENT), family(EVICTIONS, "reason")
    for labels, report in adapters:
        resident.add_metric(labels, len(report["resident"]))
        for reason, count in report["evictions"].items():
            evictions.add_metric((*labels, reason), count)
    yield resident
    yield evictions
    classes: Rows = [
        ((*labels, str(index)), one) for labels, report in replicas for index, one in enumerate(report["classes"])
    ]
    yield from families(CLASSES, classes, "class")
    registered = GaugeMetricFamily("pliant_adapters_registered", "Adapters that clients may name.", labels=("service",))
    for service, count in stats["adapters"].get("registered", {}).items():
        registered.add_metric((service,), count)
    yield registered
