"""What a route counts; the classifier and whoever answers count what they do, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric

from pliant.deployments.route.endpoint import Reason
from pliant.deployments.serving.metrics import Requests, counter

_PASSED = "Requests that were passed on, by who answers."
_INSTEAD = "Requests that `otherwise` answers instead of whoever should, by why."


class RouteMetrics(Requests):
    """As a gateway sees it; a `RouteRecorder`."""

    def __init__(self, service: str, kind: str, outcomes: Counter[str]) -> None:
        super().__init__(service, kind, outcomes)
        self._passed = counter(service, "pliant_route_passed_total", _PASSED, "model")
        self._instead = counter(service, "pliant_route_otherwise_total", _INSTEAD, "reason")

    def passed(self, model: str) -> None:
        self._passed.inc(tags={"model": model})

    def instead(self, reason: Reason) -> None:
        self._instead.inc(tags={"reason": reason})


def route_metrics(views: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of routes, for Prometheus."""
    passed = CounterMetricFamily("pliant_route_passed", _PASSED, labels=("service", "model"))
    instead = CounterMetricFamily("pliant_route_otherwise", _INSTEAD, labels=("service", "reason"))
    for service, view in views.items():
        for model, count in view.get("passed", {}).items():
            passed.add_metric((service, model), count)
        for reason, count in view.get("instead", {}).items():
            instead.add_metric((service, reason), count)
    yield from (passed, instead)
