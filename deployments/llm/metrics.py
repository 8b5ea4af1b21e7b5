"""What language models count, and what their replicas report: the same on Ray's pages and on the gateway's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.metric_table import Described, Rows, Table, families, family, replicas_of
from pliant.deployments.serving.metrics import LATENCY_S, Followed, Requests, counter, histogram
from pliant.deployments.serving.outcome import Outcome

_TOKEN_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0]

_REPLICA: Table = {
    "live": Described(False, "pliant_llm_requests_running", "Requests that have a slot."),
    "waiting": Described(False, "pliant_llm_requests_waiting", "Requests that wait for a slot."),
    "live_tokens": Described(False, "pliant_llm_live_tokens", "Tokens that its requests hold or may come to hold."),
    "tokens_per_s": Described(False, "pliant_llm_tokens_per_second", "Tokens that it generates."),
    "served": Described(True, "pliant_llm_answers", "Answers that it completed."),
    "squashed": Described(True, "pliant_requests_squashed", "Requests put back after they had passed others."),
    "preempted": Described(True, "pliant_llm_preemptions", "Requests put back for others that had come before them."),
    "bypassed": Described(True, "pliant_requests_bypassed", "Requests that passed others that waited for memory."),
}
_PREDICTOR: Table = {
    "accuracy": Described(
        False, "pliant_output_length_accuracy", "Share of answers whose length was predicted in the right class."
    ),
    "error": Described(
        False, "pliant_output_length_error", "Mean of |predicted - real| / real over the lengths of answers."
    ),
}
_MEMORY: Table = {
    "evicted": Described(True, "pliant_llm_prefix_pages_evicted", "Pages of prefixes that made room for something."),
}
_PREFIX_TOKENS: Table = {
    "tokens": Described(True, "pliant_llm_prefix_tokens", "Tokens of prompts, by whether they were there already."),
}
_PAGES: Table = {
    "pages": Described(False, "pliant_llm_pages", "Pages, by whether requests or prefixes alone have them.")
}
_ADAPTERS: Table = {
    "hits": Described(True, "pliant_adapter_cache_hits", "Requests whose adapter was in memory when they came."),
    "misses": Described(True, "pliant_adapter_cache_misses", "Requests whose adapter was not."),
    "loads": Described(True, "pliant_adapter_loads", "Adapters that were loaded."),
    "failed_loads": Described(True, "pliant_adapter_load_failures", "Adapters that could not be loaded."),
    "load_s": Described(True, "pliant_adapter_load_seconds", "What loads took, failed ones too, summed up."),
    "host_hits": Described(True, "pliant_adapter_host_hits", "Loads that read no disk, as the host's memory had it."),
    "host_bytes": Described(False, "pliant_adapter_host_bytes", "What adapters take of the host's memory (host_mb)."),
    "bytes": Described(False, "pliant_adapter_bytes_resident", "Memory of adapters that are loaded or being loaded."),
}
_CLASSES: Table = {
    "waiting": Described(
        False, "pliant_queue_requests_waiting", "Requests that wait, by queue, 0 for the smallest requests'."
    ),
    "admitted": Described(True, "pliant_queue_requests_admitted", "Requests that left their queue for a slot."),
    "waited_s": Described(True, "pliant_queue_wait_seconds", "What these had waited, summed up."),
}
_RESIDENT = Described(False, "pliant_adapters_resident", "Adapters that are in memory.")
_EVICTIONS = Described(True, "pliant_adapter_cache_evictions", "Adapters that left the memory, by why.")


def _of_replica(report: Mapping[str, Any]) -> dict[str, Any]:
    """What `_REPLICA` names, of a report."""
    return {**report, "live_tokens": sum(report.get("held", {}).values())}


def _prefix_tokens(memory: Mapping[str, Any]) -> Rows:
    """What `_PREFIX_TOKENS` names, by result."""
    return [((result,), {"tokens": memory[key]}) for result, key in (("hit", "hit"), ("miss", "missed")) if memory]


def _pages(memory: Mapping[str, Any]) -> Rows:
    """What `_PAGES` names, by state."""
    return [((state,), {"pages": memory[state]}) for state in ("live", "idle") if memory]


def llm_metrics(services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of language models and adapters, for Prometheus."""
    replicas = replicas_of(services)
    yield from families(_REPLICA, [(labels, _of_replica(report)) for labels, report in replicas])
    yield from families(_PREDICTOR, [(labels, report.get("predictor", {})) for labels, report in replicas])
    memories = [(labels, report.get("memory", {})) for labels, report in replicas]
    yield from families(_MEMORY, memories)
    for table, rows_of, label in ((_PREFIX_TOKENS, _prefix_tokens, "result"), (_PAGES, _pages, "state")):
        rows = [((*labels, *one), values) for labels, memory in memories for one, values in rows_of(memory)]
        yield from families(table, rows, label)
    adapters = [(labels, report.get("adapters", {})) for labels, report in replicas]
    yield from families(_ADAPTERS, adapters)
    resident, evictions = family(_RESIDENT), family(_EVICTIONS, "reason")
    for labels, report in adapters:
        resident.add_metric(labels, len(report.get("resident", ())))
        for reason, count in report.get("evictions", {}).items():
            evictions.add_metric((*labels, reason), count)
    yield resident
    yield evictions
    classes: Rows = [
        ((*labels, str(index)), one)
        for labels, report in replicas
        for index, one in enumerate(report.get("classes", ()))
    ]
    yield from families(_CLASSES, classes, "class")
    registered = GaugeMetricFamily("pliant_adapters_registered", "Adapters that clients may name.", labels=("service",))
    for service, view in services.items():
        if "adapters" in view:
            registered.add_metric((service,), view["adapters"])
    yield registered


class AnswerMetrics(Requests):
    """As a gateway sees it; an `endpoint.LlmRecorder`. `rank` is that of the request's adapter, 0 without one.

    The planner hears of it, too, by `tally`.
    """

    def __init__(self, service: str, kind: str, outcomes: Counter[str], tally: Tally) -> None:
        super().__init__(service, kind, outcomes)
        self._tally = tally
        self._prompt_tokens = counter(service, "pliant_prompt_tokens_total", "Tokens of answered prompts.")
        self._generated_tokens = counter(service, "pliant_generated_tokens_total", "Tokens of answers.")
        self._time_to_first_token = histogram(
            service,
            "pliant_time_to_first_token_seconds",
            "From a request's arrival in the gateway to its first token.",
            LATENCY_S,
            "rank",
        )
        self._time_per_token = histogram(
            service,
            "pliant_time_per_output_token_seconds",
            "Mean time between the tokens of an answer after its first.",
            _TOKEN_S,
            "rank",
        )

    def arrived(self, prompt_tokens: int) -> None:
        self._tally.arrived(prompt_tokens)

    def ended(self, outcome: Outcome) -> None:
        super().ended(outcome)
        if outcome is Outcome.SHED:
            self._tally.shed()

    def answered(self, seconds: float, first_s: float, prompt_tokens: int, tokens: int, rank: int) -> None:
        by_rank = {"rank": str(rank)}
        self.took(seconds)
        self._tally.wrote(tokens)
        self._prompt_tokens.inc(prompt_tokens)
        self._generated_tokens.inc(tokens)
        self._time_to_first_token.observe(first_s, tags=by_rank)
        if tokens > 1:
            self._time_per_token.observe((seconds - first_s) / (tokens - 1), tags=by_rank)


class LlmReplicaMetrics:
    """Of one replica of a language model, which Ray adds as a tag."""

    def __init__(self, service: str) -> None:
        self._replica = Followed(service, _REPLICA)
        self._predictor = Followed(service, _PREDICTOR)
        self._memory = Followed(service, _MEMORY)
        self._prefix_tokens = Followed(service, _PREFIX_TOKENS, "result")
        self._pages = Followed(service, _PAGES, "state")
        self._adapters = Followed(service, {**_ADAPTERS, "resident": _RESIDENT})
        self._evictions = Followed(service, {"evictions": _EVICTIONS}, "reason")
        self._classes = Followed(service, _CLASSES, "class")
        self._most_classes = 0
        """That there ever were."""

    def record(self, report: ReplicaReport) -> None:
        """Once for every report, in order."""
        self._replica.follow(_of_replica(report))
        self._predictor.follow(report["predictor"])
        self._memory.follow(report["memory"])
        for followed, rows in (
            (self._prefix_tokens, _prefix_tokens(report["memory"])),
            (self._pages, _pages(report["memory"])),
        ):
            for values, counts in rows:
                followed.follow(counts, *values)
        self._adapters.follow({**report["adapters"], "resident": len(report["adapters"]["resident"])})
        for reason, count in report["adapters"]["evictions"].items():
            self._evictions.follow({"evictions": count}, reason)
        for index, one in enumerate(report["classes"]):
            self._classes.follow(one, str(index))
        for index in range(len(report["classes"]), self._most_classes):
            self._classes.follow({"waiting": 0}, str(index))
        self._most_classes = max(self._most_classes, len(report["classes"]))
