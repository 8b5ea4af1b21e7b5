"""Every metric, declared once and recorded through Ray, whose Prometheus endpoints and dashboards carry it."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge, Histogram

from pliant.deployments.llm.messages import ReplicaReport

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
    """Of a language model, as its gateway sees it. `rank` is the greatest of the request's adapter, 0 without one."""

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
            "rank",
        )
        self.time_per_token = _histogram(
            service,
            "pliant_time_per_output_token_seconds",
            "Mean time between the tokens of an answer after its first.",
            _TOKEN_S,
            "rank",
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
        self._classes = 0
        """The most queues that there ever were."""
        self.class_waiting = _gauge(
            service, "pliant_queue_requests_waiting", "Requests that wait, by queue, 0 for the smallest.", "class"
        )
        self.class_admitted = _Followed(
            service, "pliant_queue_requests_admitted_total", "Requests that left their queue for a slot.", "class"
        )
        self.class_waited = _Followed(
            service, "pliant_queue_wait_seconds_total", "What these had waited, summed up.", "class"
        )
        self.squashed = _Followed(
            service, "pliant_requests_squashed_total", "Requests put back after they had passed others."
        )
        self.bypassed = _Followed(
            service, "pliant_requests_bypassed_total", "Requests that passed others that waited for memory."
        )
        self.length_accuracy = _gauge(
            service, "pliant_output_length_accuracy", "Share of answers whose length was predicted in the right class."
        )
        self.length_error = _gauge(
            service, "pliant_output_length_error", "Mean of |predicted - real| / real over the lengths of answers."
        )
        self.adapter_hits = _Followed(
            service, "pliant_adapter_cache_hits_total", "Requests whose adapter was in memory when they came."
        )
        self.adapter_misses = _Followed(service, "pliant_adapter_cache_misses_total", "Requests whose adapter was not.")
        self.adapter_evictions = _Followed(
            service, "pliant_adapter_cache_evictions_total", "Adapters that left the memory, by why.", "reason"
        )
        self.adapter_loads = _Followed(service, "pliant_adapter_loads_total", "Adapters that were loaded.")
        self.adapter_load_failures = _Followed(
            service, "pliant_adapter_load_failures_total", "Adapters that could not be loaded."
        )
        self.adapter_load_seconds = _Followed(
            service, "pliant_adapter_load_seconds_total", "What loads took, failed ones too, summed up."
        )
        self.adapter_bytes = _gauge(
            service, "pliant_adapter_bytes_resident", "Memory of adapters that are loaded or being loaded."
        )
        self.adapters_resident = _gauge(service, "pliant_adapters_resident", "Adapters that are in memory.")

    def record(self, report: ReplicaReport) -> None:
        """Once for every report, in order."""
        self.live.set(report["live"])
        self.waiting.set(report["waiting"])
        self.live_tokens.set(sum(report["live_tokens"].values()))
        self.squashed.follow(report["squashed"])
        self.bypassed.follow(report["bypassed"])
        self.length_accuracy.set(report["predictor"]["accuracy"])
        self.length_error.set(report["predictor"]["error"])
        for index, one in enumerate(report["classes"]):
            self.class_waiting.set(one["waiting"], {"class": str(index)})
            self.class_admitted.follow(one["admitted"], str(index))
            self.class_waited.follow(one["waited_s"], str(index))
        for index in range(len(report["classes"]), self._classes):
            self.class_waiting.set(0, {"class": str(index)})
        self._classes = max(self._classes, len(report["classes"]))
        adapters = report["adapters"]
        self.adapter_hits.follow(adapters["hits"])
        self.adapter_misses.follow(adapters["misses"])
        for reason, count in adapters["evictions"].items():
            self.adapter_evictions.follow(count, reason)
        self.adapter_loads.follow(adapters["loads"])
        self.adapter_load_failures.follow(adapters["failed_loads"])
        self.adapter_load_seconds.follow(adapters["load_s"])
        self.adapter_bytes.set(adapters["bytes"])
        self.adapters_resident.set(len(adapters["resident"]))


class ReplicaMetrics:
    """Of one replica, which Ray adds as a tag. `runtime` is the max_length that it holds."""

    def __init__(self, service: str) -> None:
        self.waiting = _gauge(service, "pliant_requests_waiting", "Requests queued or running in a replica.", "runtime")


class _Followed:
    """A counter that follows a count which something else keeps, and which may begin again at 0."""

    def __init__(self, service: str, name: str, description: str, *tags: str) -> None:
        self._counter = _counter(service, name, description, *tags)
        self._tags = tags
        self._counts: dict[tuple[str, ...], float] = {}

    def follow(self, count: float, *values: str) -> None:
        """The count now; `values` are those of the tags."""
        before = self._counts.get(values, 0.0)
        self._counts[values] = count
        if more := count - before if count >= before else count:
            self._counter.inc(more, dict(zip(self._tags, values, strict=True)))


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
