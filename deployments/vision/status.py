"""The serving view of vision services for Prometheus, from what replicas report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from pliant.deployments.serving.metric_families import families, family, replicas_of
from pliant.deployments.vision.metric_tables import FATE, FATES, GAMMAS, REPLICA


def vision_metrics(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What "/stats" says of vision services, for Prometheus."""
    views = stats.get("vision", {})
    replicas = replicas_of(views)
    yield from families(REPLICA, replicas)
    fates = family(FATE, "fate")
    for labels, report in replicas:
        for fate in FATES:
            fates.add_metric((*labels, fate), report[fate])
    yield fates
    gammas = [((*labels, str(gamma)), one) for labels, report in replicas for gamma, one in report["gammas"].items()]
    yield from families(GAMMAS, gammas, "gamma")
    tasks = GaugeMetricFamily("pliant_vision_tasks_registered", "Tasks that clients may name.", labels=("service",))
    for service, view in views.items():
        tasks.add_metric((service,), len(view["tasks"]))
    yield tasks
