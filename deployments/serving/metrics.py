"""Every metric, declared once and recorded through Ray, whose Prometheus endpoints and dashboards carry it."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from pliant.deployments.llm import metric_tables as llm
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.serving.metric_table import Table
from pliant.deployments.serving.outcome import Outcome, Retry
from pliant.deployments.vision import metric_tables as vision
from pliant.deployments.vision.report import EngineReport

_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0]
_ANSWER_S = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
_SURE = [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0]
_LATENCY_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]


class RequestRecorder:
    """Counts how the requests of one service end, also in `outcomes`, and how often another replica was asked."""

    def __init__(self, service: str, kind: str, outcomes: collections.Counter[str]) -> None:
        self._kind = kind
        self._outcomes = outcomes
        self._requests = _counter(
            service, "pliant_requests_total", "Texts, images or answers, by outcome.", "kind", "outcome"
        )
        self._retries = _counter(
            service, "pliant_retries_total", "Times that another replica was asked, by why.", "kind", "reason"
        )

    def ended(self, outcome: Outcome) -> None:
        self._outcomes[outcome.value] += 1
        self._requests.inc(tags={"kind": self._kind, "outcome": outcome.value})

    def retried(self, why: Retry) -> None:
        self._retries.inc(tags={"kind": self._kind, "reason": why})


class EncoderMetrics:
    """Of a classifier service, as its gateway sees it. `runtime` is the max_length of the runtime that answered."""

    def __init__(self, service: str) -> None:
        self.tokens = _counter(service, "pliant_tokens_total", "Tokens of answered texts.", "runtime")
        self.padding = _counter(
            service, "pliant_padding_tokens_total", "Tokens by which runtimes padded answered texts.", "runtime"
        )
        self.slo_violations = _counter(service, "pliant_slo_violations_total", "Texts answered after their SLO.")
        self.shed = _counter(
            service, "pliant_requests_shed_total", "Texts refused because they would have missed their SLO."
        )
        self.latency = _histogram(
            service,
            "pliant_request_latency_seconds",
            "From a text's arrival in the gateway to its answer.",
            _LATENCY_S,
            "runtime",
        )


class CascadeMetrics:
    """Of a cascade, as its gateway sees it. `level` is a service, of answers the last one that read the text.

    The levels' own metrics count these texts, too.
    """

    def __init__(self, service: str) -> None:
        self.rerouted = _counter(
            service, "pliant_cascade_rerouted_total", "Texts that a level sent on to the next.", "level"
        )
        self.words = _counter(service, "pliant_cascade_words_total", "Words of texts that were pruned.", "level")
        self.words_pruned = _counter(
            service, "pliant_cascade_words_pruned_total", "Words that the level after did not read.", "level"
        )
        self.drifting = _gauge(
            service,
            "pliant_cascade_reroute_drifting",
            "Whether the level sends on another share of texts now than in the profile.",
            "level",
        )
        self.drifts = _counter(
            service, "pliant_cascade_reroute_drifts_total", "Times that such a drift began.", "level"
        )
        self.degraded = _counter(
            service,
            "pliant_cascade_degraded_total",
            "Texts answered without a level that was to read them, by why.",
            "level",
            "reason",
        )
        self.slo_violations = _counter(
            service, "pliant_cascade_slo_violations_total", "Texts answered after the cascade's SLO."
        )
        self.confidence = _histogram(
            service, "pliant_cascade_confidence", "Calibrated, of answers that were given.", _SURE, "level"
        )
        self.latency = _histogram(
            service,
            "pliant_cascade_latency_seconds",
            "From a text's arrival in the gateway to its answer.",
            _LATENCY_S,
            "level",
        )


class LlmMetrics:
    """Of a language model, as its gateway sees it. `rank` is the greatest of the request's adapter, 0 without one."""

    def __init__(self, service: str) -> None:
        self.prompt_tokens = _counter(service, "pliant_prompt_tokens_total", "Tokens of answered prompts.")
        self.generated_tokens = _counter(service, "pliant_generated_tokens_total", "Tokens of answers.")
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
        self._replica = _Followed(service, llm.REPLICA)
        self._predictor = _Followed(service, llm.PREDICTOR)
        self._adapters = _Followed(service, {**llm.ADAPTERS, "resident": llm.RESIDENT})
        self._evictions = _Followed(service, {"evictions": llm.EVICTIONS}, "reason")
        self._classes = _Followed(service, llm.CLASSES, "class")
        self._most_classes = 0
        """That there ever were."""

    def record(self, report: ReplicaReport) -> None:
        """Once for every report, in order."""
        self._replica.follow({**report, "live_tokens": sum(report["live_tokens"].values())})
        self._predictor.follow(report["predictor"])
        self._adapters.follow({**report["adapters"], "resident": len(report["adapters"]["resident"])})
        for reason, count in report["adapters"]["evictions"].items():
            self._evictions.follow({"evictions": count}, reason)
        for index, one in enumerate(report["classes"]):
            self._classes.follow(one, str(index))
        for index in range(len(report["classes"]), self._most_classes):
            self._classes.follow({"waiting": 0}, str(index))
        self._most_classes = max(self._most_classes, len(report["classes"]))


class VisionMetrics:
    """Of a vision service, as its gateway sees it. `gamma` counts tokens added to each layer, or merged if negative."""

    def __init__(self, service: str) -> None:
        self.answers = _counter(service, "pliant_vision_answers_total", "Images answered.", "task")
        self.slo_violations = _counter(
            service, "pliant_vision_slo_violations_total", "Images answered after their deadline.", "task"
        )
        self.latency = _histogram(
            service,
            "pliant_vision_latency_seconds",
            "From an image's arrival in the gateway to its answer.",
            _LATENCY_S,
            "gamma",
        )


class VisionReplicaMetrics:
    """Of one replica of a vision service, which Ray adds as a tag."""

    def __init__(self, service: str) -> None:
        self._replica = _Followed(service, vision.REPLICA)
        self._fates = _Followed(service, {"images": vision.FATE}, "fate")
        self._gammas = _Followed(service, vision.GAMMAS, "gamma")

    def record(self, report: EngineReport) -> None:
        """Once for every report, in order."""
        self._replica.follow(report)
        for fate in vision.FATES:
            self._fates.follow({"images": report[fate]}, fate)  # type: ignore[literal-required]
        for gamma, one in report["gammas"].items():
            self._gammas.follow(one, str(gamma))


class ReplicaMetrics:
    """Of one replica, which Ray adds as a tag. `runtime` is the max_length that it holds."""

    def __init__(self, service: str) -> None:
        self.waiting = _gauge(service, "pliant_requests_waiting", "Requests queued or running in a replica.", "runtime")


class _Followed:
    """The metrics of `table`, which follow what something else keeps; its counts may begin again at 0."""

    def __init__(self, service: str, table: Table, *tags: str) -> None:
        self._gauges = {key: _gauge(service, *each[1:], *tags) for key, each in table.items() if not each.counts}
        self._counters = {
            key: _counter(service, f"{each.name}_total", each.description, *tags)
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
