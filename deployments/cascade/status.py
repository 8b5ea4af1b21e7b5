"""The serving view of cascades for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_LABELS = ("service", "level")


def cascade_metrics(views: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of cascades, for Prometheus."""
    chosen = {name: view for name, view in views.items() if "levels" in view}
    yield _gauge("pliant_cascade_ready", "Whether a candidate is chosen and its levels are up.", views, _ready)
    yield _gauge("pliant_cascade_promise_kept", "Whether what serves meets what was asked for.", chosen, _kept)
    yield _gauge(
        "pliant_cascade_profiled_accuracy",
        "Of what serves, on the labelled texts.",
        chosen,
        _accuracy,
    )
    rows = [((name, level), one) for name, view in chosen.items() for level, one in view["reroutes"].items()]
    share = GaugeMetricFamily(
        "pliant_cascade_profiled_reroute_share", "Of texts that the level sent on in the profile.", labels=_LABELS
    )
    drifting = GaugeMetricFamily(
        "pliant_cascade_reroute_drifting", "Whether another share goes on now than in the profile.", labels=_LABELS
    )
    drifts = CounterMetricFamily("pliant_cascade_reroute_drifts", "Times that such a drift began.", labels=_LABELS)
    for labels, one in rows:
        share.add_metric(labels, one["profiled_share"])
        drifting.add_metric(labels, float(one["drift"] is not None))
        drifts.add_metric(labels, one["drifts"])
    yield from (share, drifting, drifts)


def _gauge(name: str, description: str, views: Mapping[str, Mapping[str, Any]], value: Any) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, description, labels=("service",))
    for service, view in views.items():
        gauge.add_metric((service,), float(value(view)))
    return gauge


def _ready(view: Mapping[str, Any]) -> bool:
    return bool(view["ready"])


def _accuracy(view: Mapping[str, Any]) -> float:
    return float(view["accuracy"])


def _kept(view: Mapping[str, Any]) -> bool:
    return view["unmet"] is None
