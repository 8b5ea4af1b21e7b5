"""Every metric, declared once and recorded through Ray, whose Prometheus endpoints and dashboards carry it."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge, Histogram

_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0]
_ANSWER_S = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
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
        self.latency = _histogram(
            service,
            "pliant_request_latency_seconds",
            "From a text's arrival in the gateway to its answer.",
            _LATENCY_S,
            "runtime",
        )


class LlmMetrics:
    """Of a language model, as its gateway sees it."""

    def __init__(self, service: str) -> None:
        self.requests = _counter(service, "pliant_llm_requests_total", "Answers by outcome, an HTTP status.", "status")
        self.prompt_tokens = _counter(service, "pliant_prompt_tokens_total", "Tokens of answered prompts.")
        self.generated_tokens = _counter(service, "pliant_generated_tokens_total", "Tokens of answers.")
        self.retries = _counter(
            service, "pliant_llm_retries_total", "Answers sent to a replica again, by why; lost: it goes on.", "reason"
        )
        self.time_to_first_token = _histogram(
            service,
            "pliant_time_to_first_token_seconds",
            "From a request's arrival in the gateway to its first token.",
            _LATENCY_S,
        )
        self.time_per_token = _histogram(
            service,
            "pliant_time_per_output_token_seconds",
            "Mean time between the tokens of an answer after its first.",
            _TOKEN_S,
        )
        self.latency = _histogram(
            service,
            "pliant_answer_latency_seconds",
            "From a request's arrival in the gateway to the end of its answer.",
            _ANSWER_S,
        )


class LlmReplicaMetrics:
    """Of one replica of a language model, which Ray adds as a tag."""

    def __init__(self, service: str) -> None:
        self.waiting = _gauge(service, "pliant_llm_requests_waiting", "Requests that wait for a slot.")
        self.live = _gauge(service, "pliant_llm_requests_running", "Requests that have a slot.")
        self.live_tokens = _gauge(
            service, "pliant_llm_live_tokens", "Tokens that its requests hold or may come to hold."
        )


class ReplicaMetrics:
    """Of one replica, which Ray adds as a tag. `runtime` is the max_length that it holds."""

    def __init__(self, service: str) -> None:
        self.waiting = _gauge(service, "pliant_requests_waiting", "Requests queued or running in a replica.", "runtime")


def _counter(service: str, name: str, description: str, *tags: str) -> Counter:
    counter = Counter(name, description, tag_keys=("service", *tags))  # type: ignore[arg-type]  # Ray says Tuple[str]
    counter.set_default_tags({"service": service})
    return counter


def _gauge(service: str, name: str, description: str, *tags: str) -> Gauge:
    gauge = Gauge(name, description, tag_keys=("service", *tags))  # type: ignore[arg-type]
    gauge.set_default_tags({"service": service})
    return gauge


def _histogram(service: str, name: str, description: str, boundaries: list[float], *tags: str) -> Histogram:
    histogram = Histogram(name, description, boundaries, tag_keys=("service", *tags))  # type: ignore[arg-type]
    histogram.set_default_tags({"service": service})
    return histogram
