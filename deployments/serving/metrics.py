"""What all services count, and how metrics are declared: through Ray, whose Prometheus pages and dashboards show them.

What only a kind counts is in its own `metrics`.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from ray.serve.metrics import Counter, Gauge, Histogram

from pliant.deployments.serving.haproxy_counts import Seen
from pliant.deployments.serving.metric_table import Table
from pliant.deployments.serving.outcome import Outcome, Retry

LATENCY_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]


class Requests:
    """Of a service, as one gateway sees it; a `Recorder`. A request of several texts or images counts as so many."""

    def __init__(self, service: str, kind: str, outcomes: Count[str]) -> None:
        """`outcomes` counts how many requests ended how, for /stats."""
        self._outcomes = outcomes
        self._requests = _requests(service)
        self._retries = counter(
            service, "pliant_retries_total", "Times that another replica was asked, by why.", "kind", "reason"
        )
        self._late = counter(
            service, "pliant_slo_violations_total", "Answers that came after the SLO of their request.", "kind"
        )
        self._latency = histogram(
            service,
            "pliant_request_latency_seconds",
            "From a request's arrival in the gateway to its whole answer.",
            LATENCY_S,
            "kind",
        )
        self._tags = {"kind": kind}

    def ended(self, outcome: Outcome) -> None:
        self._outcomes[outcome] += 1
        self._requests.inc(tags={**self._tags, "outcome": str(outcome)})

    def retried(self, why: Retry) -> None:
        self._retries.inc(tags={**self._tags, "reason": why})

    def took(self, seconds: float, in_time: bool = True) -> None:
        """An answer was there after `seconds`."""
        self._latency.observe(seconds, tags=self._tags)
        if not in_time:
            self._late.inc(tags=self._tags)


class Refusals:
    """Requests for which a gateway has no place, of the services whose `kinds` and `outcomes` are given by name."""

    def __init__(self, kinds: Mapping[str, str], outcomes: Mapping[str, Count[str]]) -> None:
        self._kinds = kinds
        self._outcomes = outcomes
        self._requests = {name: _requests(name) for name in ("", *kinds)}

    def __call__(self, service: str, outcome: Outcome) -> None:
        """One of `service`, or of none that is known yet."""
        if service:
            self._outcomes[service][outcome] += 1
        self._requests[service].inc(tags={"kind": self._kinds.get(service, ""), "outcome": str(outcome)})


class TenantMetrics:
    """Of all tenants, as one gateway sees them; a `TenantRecorder`. cluster.yaml names all that there are."""

    def __init__(self) -> None:
        tags: Any = ("tenant", "status")
        self._requests = Counter("pliant_tenant_requests_total", "HTTP requests, by tenant and status.", tag_keys=tags)
        text = "Tokens of texts, prompts and answers, by tenant."
        self._tokens = Counter("pliant_tenant_tokens_total", text, tag_keys=tags[:1])
        self._spent: dict[str, int] = {}
        """In this turn of the event loop."""

    def answered(self, tenant: str, status: int) -> None:
        self._requests.inc(tags={"tenant": tenant, "status": str(status)})

    def spent(self, tenant: str, tokens: int) -> None:
        if not self._spent:  # a call of Ray's counter costs as much as all else that a token does here
            asyncio.get_running_loop().call_soon(self._count)
        self._spent[tenant] = self._spent.get(tenant, 0) + tokens

    def _count(self) -> None:
        for tenant, tokens in self._spent.items():
            self._tokens.inc(tokens, tags={"tenant": tenant})
        self._spent.clear()


class EdgeMetrics:
    """What one gateway of each machine counts of its HAProxy; a `Recorder` of `haproxy_counts`."""

    def __init__(self) -> None:
        tags: Any = ("status",)
        text = "Requests that HAProxy answered itself, since no gateway did, by the class of the status."
        self._answered = Counter("pliant_edge_answers_total", text, tag_keys=tags)
        self._retried = Counter("pliant_edge_retries_total", "Times that HAProxy asked another gateway.")

    def saw(self, seen: Seen) -> None:
        for status, count in seen.answered.items():
            if count:
                self._answered.inc(count, tags={"status": status})
        if seen.retried:
            self._retried.inc(seen.retried)


class Followed:
    """The metrics of `table`, which follow what something else keeps; its counts may begin again at 0."""

    def __init__(self, service: str, table: Table, *tags: str) -> None:
        self._gauges = {key: gauge(service, *each[1:], *tags) for key, each in table.items() if not each.counts}
        self._counters = {
            key: counter(service, f"{each.name}_total", each.description, *tags)
            for key, each in table.items()
            if each.counts
        }
        self._tags = tags
        self._counts: dict[tuple[str, ...], float] = {}

    def follow(self, report: Mapping[str, Any], *values: str) -> None:
        """Those that `report` has, as it has them now; `values` are those of the tags."""
        tags = dict(zip(self._tags, values, strict=True))
        for key in self._gauges.keys() & report.keys():
            self._gauges[key].set(report[key], tags)
        for key in self._counters.keys() & report.keys():
            before = self._counts.get((key, *values), 0.0)
            count = self._counts[key, *values] = report[key]
            if more := count - before if count >= before else count:
                self._counters[key].inc(more, tags)


def stats_metrics(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What "/stats" says of the planner and of services of all kinds, for Prometheus."""
    yield GaugeMetricFamily("pliant_planner_reached", "Whether the planner answered of late.", stats["planner_reached"])
    labels = ("service", "kind")
    ready = GaugeMetricFamily("pliant_service_ready", "Whether the service can answer.", labels=labels)
    there = GaugeMetricFamily("pliant_service_replicas", "Replicas that the gateway knows.", labels=labels)
    ejected = GaugeMetricFamily("pliant_service_replicas_ejected", "Those that are left alone.", labels=labels)
    problems = GaugeMetricFamily(
        "pliant_service_problems", "Adapters, tasks or promises that need a person.", labels=labels
    )
    for name, view in stats["services"].items():
        of = (name, view["kind"])
        ready.add_metric(of, view["ready"])
        if view["replica_range"]:
            there.add_metric(of, len(view["replicas"]))
            ejected.add_metric(of, sum(bool(report.get("ejected")) for report in view["replicas"].values()))
        problems.add_metric(of, len(view.get("problems", ())) + bool(view.get("problem")))
    yield from (ready, there, ejected, problems)


def _requests(service: str) -> Counter:
    return counter(service, "pliant_requests_total", "Texts, answers or images, by outcome.", "kind", "outcome")


def counter(service: str, name: str, description: str, *tags: str) -> Counter:
    """Of `service`, which is a tag of its own; its name ends in _total."""
    counter = Counter(name, description, tag_keys=("service", *tags))  # type: ignore[arg-type]  # Ray says Tuple[str]
    counter.set_default_tags({"service": service})
    return counter


def gauge(service: str, name: str, description: str, *tags: str) -> Gauge:
    """Of `service`, which is a tag of its own."""
    gauge = Gauge(name, description, tag_keys=("service", *tags))  # type: ignore[arg-type]
    gauge.set_default_tags({"service": service})
    return gauge


def histogram(service: str, name: str, description: str, boundaries: list[float], *tags: str) -> Histogram:
    """Of `service`, which is a tag of its own."""
    histogram = Histogram(name, description, boundaries, tag_keys=("service", *tags))  # type: ignore[arg-type]
    histogram.set_default_tags({"service": service})
    return histogram
