"""Every metric, declared once and recorded through Ray, whose Prometheus endpoints and dashboards carry it."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge, Histogram

_LATENCY_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]


class EncoderMetrics:
    """Of a classifier service, as its gateway sees it. `runtime` is the max_length of the runtime that answered."""

    def __init__(self, service: str) -> None:
        self.requests = _counter(service, "pliant_requests_total", "Texts by outcome, an HTTP status.", "status")
        self.tokens = _counter(service, "pliant_tokens_total", "Tokens of answered texts.", "runtime")
        self.padding = _counter(
            service, "pliant_padding_tokens_total", "Tokens by which runtimes padded answered texts.", "runtime"
        )
        self.slo_violations = _counter(service, "pliant_slo_violations_total", "Texts answered after their SLO.")
        self.shed = _counter(
            service, "pliant_requests_shed_total", "Texts refused because they would have missed their SLO."
        )
        self.retries = _counter(service, "pliant_retries_total", "Texts sent to a replica again, by why.", "reason")
        self.latency = Histogram(
            "pliant_request_latency_seconds",
            "From a text's arrival in the gateway to its answer.",
            boundaries=_LATENCY_S,
            tag_keys=("service", "runtime"),  # type: ignore[arg-type]  # Ray says Tuple[str], of any length
        )
        self.latency.set_default_tags({"service": service})


class ReplicaMetrics:
    """Of one replica, which Ray adds as a tag. `runtime` is the max_length that it holds."""

    def __init__(self, service: str) -> None:
        self.waiting = Gauge(
            "pliant_requests_waiting",
            "Requests queued or running in a replica.",
            tag_keys=("service", "runtime"),  # type: ignore[arg-type]
        )
        self.waiting.set_default_tags({"service": service})


def _counter(service: str, name: str, description: str, *tags: str) -> Counter:
    counter = Counter(name, description, tag_keys=("service", *tags))  # type: ignore[arg-type]
    counter.set_default_tags({"service": service})
    return counter
