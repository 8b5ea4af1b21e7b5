"""What services count that pass prompts on; what chooses and whoever answers count what they do, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric

from pliant.deployments.http.passing.router import Reason
from pliant.deployments.serving.metric_table import Described, Rows, labelled
from pliant.deployments.serving.metrics import Requests, counter

_PASSED = Described(True, "pliant_route_passed", "Requests that were passed on, by who answers.")
_INSTEAD = Described(True, "pliant_route_otherwise", "Requests that another one answers than might have, by why.")


class PassingMetrics(Requests):
    """As a gateway sees it; a `PassingRecorder`."""

    def __init__(self, service: str, kind: str, outcomes: Counter[str]) -> None:
        super().__init__(service, kind, outcomes)
        self._passed = counter(service, f"{_PASSED.name}_total", _PASSED.description, "model")
        self._instead = counter(service, f"{_INSTEAD.name}_total", _INSTEAD.description, "reason")

    def passed(self, model: str) -> None:
        self._passed.inc(tags={"model": model})

    def instead(self, reason: Reason) -> None:
        self._instead.inc(tags={"reason": reason})


def passing_metrics(views: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of such services, for Prometheus."""
    for key, described, label in (("passed", _PASSED, "model"), ("instead", _INSTEAD, "reason")):
        rows: Rows = [
            ((service, value), {key: count})
            for service, view in views.items()
            for value, count in view.get(key, {}).items()
        ]
        yield from labelled({key: described}, rows, "service", label)
