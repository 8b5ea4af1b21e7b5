"""What replicas of classifiers report, and the plan for them, as metrics on the gateway's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_PLAN = {
    "version": ("pliant_plan_version", "Counts the plans that were made since the planner started."),
    "age_s": ("pliant_plan_age_seconds", "How long ago the current plan was made."),
    "solve_s": ("pliant_plan_solve_seconds", "How long the allocation took to solve."),
    "predicted_latency_s": ("pliant_plan_predicted_latency_seconds", "Mean latency that the plan predicts."),
    "excess_per_s": ("pliant_plan_excess_requests_per_second", "Demand that the replicas cannot answer in time."),
    "wanted_replicas": ("pliant_wanted_replicas", "Replicas that the service should have now."),
    "last_move_s": ("pliant_last_move_seconds", "From when routing stopped until the last move was published."),
}
_PLAN_BY_RUNTIME = {
    "replicas": ("pliant_planned_replicas", "Replicas that should hold the runtime."),
    "demand_per_s": ("pliant_demand_requests_per_second", "Texts for which the runtime is the shortest that fits."),
}
_MOVES = {
    "moves": ("pliant_moves", "Times that a replica was given another length."),
    "failed_moves": ("pliant_failed_moves", "Times that a replica could not be given another length."),
}
_LABELS = ("service", "replica", "runtime")
_GAUGES = {
    "max_length": (
        "pliant_runtime_max_length_tokens",
        "The input length that the replica holds; 0 while it switches.",
        1,
    ),
    "home": ("pliant_home_tokens", "The length of the texts that the replica is to have first.", 1),
    "waiting": ("pliant_requests_waiting", "Requests queued or running in the replica.", 1),
    "service_s": ("pliant_service_time_seconds", "What one request takes on this runtime.", 1),
    "p50_ms": ("pliant_replica_latency_p50_seconds", "Median latency of recent requests within the replica.", 1e-3),
    "p98_ms": ("pliant_replica_latency_p98_seconds", "98th percentile of the same.", 1e-3),
}
_COUNTERS = {
    "served": ("pliant_requests_served", "Requests that the replica has answered."),
    "passes": ("pliant_passes", "Computations of the replica, each of one text or a batch."),
}


def encoder_metrics(services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of classifiers, for Prometheus."""
    replicas = [
        ((service, replica, str(report.get("max_length", 0))), report)
        for service, view in services.items()
        for replica, report in view["replicas"].items()
    ]
    for key, (name, description, unit) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, description, labels=_LABELS)
        for labels, report in replicas:
            if key in report:  # a replica of another version may not have it
                gauge.add_metric(labels, report[key] * unit)
        yield gauge
    for key, (name, description) in _COUNTERS.items():
        counter = CounterMetricFamily(name, description, labels=_LABELS)
        for labels, report in replicas:
            counter.add_metric(labels, report.get(key, 0))
        yield counter
    yield from _planned({service: view["plan"] for service, view in services.items() if view["plan"]})


def _planned(plans: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    for key, (name, description) in _PLAN.items():
        gauge = GaugeMetricFamily(name, description, labels=("service",))
        for service, plan in plans.items():
            if key in plan:
                gauge.add_metric((service,), plan[key])
        yield gauge
    for key, (name, description) in _PLAN_BY_RUNTIME.items():
        gauge = GaugeMetricFamily(name, description, labels=("service", "runtime"))
        for service, plan in plans.items():
            for runtime, value in plan.get(key, {}).items():
                gauge.add_metric((service, runtime), value)
        yield gauge
    for key, (name, description) in _MOVES.items():
        counter = CounterMetricFamily(name, description, labels=("service",))
        for service, plan in plans.items():
            counter.add_metric((service,), plan[key])
        yield counter
