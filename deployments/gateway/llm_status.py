"""The serving view of language models and their adapters for Prometheus, from what replicas report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pliant.deployments.llm.metric_tables import (
    ADAPTERS,
    CLASSES,
    EVICTIONS,
    PREDICTOR,
    REPLICA,
    RESIDENT,
    Described,
    Table,
)

_Rows = list[tuple[tuple[str, ...], Mapping[str, Any]]]


def llm_metrics(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What "/stats" says of language models and adapters, for Prometheus."""
    replicas: _Rows = [
        ((service, replica), report)
        for service, view in stats["language_models"].items()
        for replica, report in view["replicas"].items()
    ]
    yield from _families(REPLICA, replicas)
    yield from _families(PREDICTOR, [(labels, report["predictor"]) for labels, report in replicas])
    adapters = [(labels, report["adapters"]) for labels, report in replicas]
    yield from _families(ADAPTERS, adapters)
    resident, evictions = _family(RESIDENT), _family(EVICTIONS, "reason")
    for labels, report in adapters:
        resident.add_metric(labels, len(report["resident"]))
        for reason, count in report["evictions"].items():
            evictions.add_metric((*labels, reason), count)
    yield resident
    yield evictions
    classes: _Rows = [
        ((*labels, str(index)), one) for labels, report in replicas for index, one in enumerate(report["classes"])
    ]
    yield from _families(CLASSES, classes, "class")
    registered = GaugeMetricFamily("pliant_adapters_registered", "Adapters that clients may name.", labels=("service",))
    for service, count in stats["adapters"].get("registered", {}).items():
        registered.add_metric((service,), count)
    yield registered


def _families(table: Table, rows: _Rows, *more: str) -> Iterator[Metric]:
    for key, described in table.items():
        made = _family(described, *more)
        for labels, values in rows:
            made.add_metric(labels, values[key])
        yield made


def _family(described: Described, *more: str) -> GaugeMetricFamily | CounterMetricFamily:
    """Without values yet. Its labels are service, replica and `more`."""
    family = CounterMetricFamily if described.counts else GaugeMetricFamily
    return family(described.name, described.description, labels=("service", "replica", *more))
