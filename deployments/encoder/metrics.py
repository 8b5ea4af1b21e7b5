"""What classifier services count, and what their replicas report and the plan says, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric

from pliant.deployments.encoder.messages import Answer
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.metric_table import (
    Described,
    Rows,
    Table,
    families,
    labelled,
    replicas_of,
)
from pliant.deployments.serving.metrics import Requests, counter, gauge
from pliant.deployments.serving.outcome import Outcome

_REPLICA: Table = {
    "max_length": Described(
        False, "pliant_runtime_max_length_tokens", "The input length that the replica holds; 0 while it switches."
    ),
    "home": Described(False, "pliant_home_tokens", "The length of the texts that the replica is to have first."),
    "waiting": Described(False, "pliant_requests_waiting", "Requests queued or running in the replica."),
    "service_s": Described(False, "pliant_service_time_seconds", "What one request takes on this runtime."),
    "p50_s": Described(
        False, "pliant_replica_latency_p50_seconds", "Median latency of recent requests within the replica."
    ),
    "p98_s": Described(False, "pliant_replica_latency_p98_seconds", "98th percentile of the same."),
    "served": Described(True, "pliant_requests_served", "Requests that the replica has answered."),
    "passes": Described(True, "pliant_passes", "Computations of the replica, each of one text or a batch."),
}
_PLAN: Table = {
    "version": Described(False, "pliant_plan_version", "Counts the plans that were made since the planner started."),
    "age_s": Described(False, "pliant_plan_age_seconds", "How long ago the current plan was made."),
    "solve_s": Described(False, "pliant_plan_solve_seconds", "How long the allocation took to solve."),
    "predicted_latency_s": Described(
        False, "pliant_plan_predicted_latency_seconds", "Mean latency that the plan predicts."
    ),
    "excess_per_s": Described(
        False, "pliant_plan_excess_requests_per_second", "Demand that the replicas cannot answer in time."
    ),
    "wanted_replicas": Described(False, "pliant_wanted_replicas", "Replicas that the service should have now."),
    "last_move_s": Described(
        False, "pliant_last_move_seconds", "From when routing stopped until the last move was published."
    ),
    "moves": Described(True, "pliant_moves", "Times that a replica was given another length."),
    "failed_moves": Described(True, "pliant_failed_moves", "Times that a replica could not be given another length."),
}
_PLAN_BY_RUNTIME: Table = {
    "replicas": Described(False, "pliant_planned_replicas", "Replicas that should hold the runtime."),
    "demand_per_s": Described(
        False, "pliant_demand_requests_per_second", "Texts for which the runtime is the shortest that fits."
    ),
}


def encoder_metrics(services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of classifiers, for Prometheus."""
    reports: Rows = [
        ((*labels, str(report.get("max_length", 0))), _in_seconds(report)) for labels, report in replicas_of(services)
    ]
    yield from families(_REPLICA, reports, "runtime")
    plans = {service: view["plan"] for service, view in services.items() if view["plan"]}
    yield from labelled(_PLAN, [((service,), plan) for service, plan in plans.items()], "service")
    by_runtime: Rows = [
        ((service, runtime), {key: value})
        for service, plan in plans.items()
        for key in _PLAN_BY_RUNTIME
        for runtime, value in plan.get(key, {}).items()
    ]
    yield from labelled(_PLAN_BY_RUNTIME, by_runtime, "service", "runtime")


def _in_seconds(report: Mapping[str, Any]) -> dict[str, Any]:
    """A replica's report, with what `_REPLICA` has in seconds."""
    latencies = {f"{name}_s": report[f"{name}_ms"] / 1000 for name in ("p50", "p98") if f"{name}_ms" in report}
    return {**report, **latencies}


class TextMetrics(Requests):
    """As a gateway sees it; an `endpoint.TextRecorder`. `runtime` is the max_length of the runtime that answered.

    The planner hears of it, too, by `tally`.
    """

    def __init__(self, service: str, kind: str, outcomes: Counter[str], tally: Tally) -> None:
        super().__init__(service, kind, outcomes)
        self._tally = tally
        self._tokens = counter(service, "pliant_tokens_total", "Tokens of answered texts.", "runtime")
        self._padding = counter(
            service, "pliant_padding_tokens_total", "Tokens by which runtimes padded answered texts.", "runtime"
        )

    def arrived(self, tokens: int) -> None:
        self._tally.arrived(tokens)

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None:
        self.took(seconds, seconds <= slo_s)
        self._tally.answered(seconds / slo_s)
        tags = {"runtime": str(answer.max_length)}
        self._tokens.inc(tokens, tags=tags)
        if answer.computed > tokens:
            self._padding.inc(answer.computed - tokens, tags=tags)

    def shed(self) -> None:
        self._tally.shed()

    def ended(self, outcome: Outcome) -> None:
        super().ended(outcome)
        if outcome in (Outcome.UNAVAILABLE, Outcome.FAILED, Outcome.CANCELLED):
            self._tally.lost()


class ReplicaMetrics:
    """Of one replica, which Ray adds as a tag. `runtime` is the max_length that it holds."""

    def __init__(self, service: str) -> None:
        self.waiting = gauge(service, "pliant_requests_waiting", "Requests queued or running in a replica.", "runtime")
