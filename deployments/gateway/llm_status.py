"""The serving view of language models and their adapters for Prometheus, from what replicas report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_REPLICA = {
    "live": (_GAUGE, "pliant_llm_requests_running", "Requests that have a slot in the replica."),
    "waiting": (_GAUGE, "pliant_llm_requests_waiting", "Requests that wait for a slot in the replica."),
    "live_tokens": (_GAUGE, "pliant_llm_live_tokens", "Tokens that the replica's requests hold or may come to hold."),
    "tokens_per_s": (_GAUGE, "pliant_llm_tokens_per_second", "Tokens that the replica generates."),
    "served": (_COUNTER, "pliant_llm_answers", "Answers that the replica completed."),
    "squashed": (_COUNTER, "pliant_requests_squashed", "Requests put back after they had passed others."),
    "bypassed": (_COUNTER, "pliant_requests_bypassed", "Requests that passed others that waited for memory."),
}
_PREDICTOR = {
    "accuracy": (_GAUGE, "pliant_output_length_accuracy", "Share of answers predicted in the right class of lengths."),
    "error": (_GAUGE, "pliant_output_length_error", "Mean of |predicted - real| / real over the lengths of answers."),
}
_ADAPTERS = {
    "hits": (_COUNTER, "pliant_adapter_cache_hits", "Requests whose adapter was in memory when they came."),
    "misses": (_COUNTER, "pliant_adapter_cache_misses", "Requests whose adapter was not."),
    "loads": (_COUNTER, "pliant_adapter_loads", "Adapters that were loaded."),
    "failed_loads": (_COUNTER, "pliant_adapter_load_failures", "Adapters that could not be loaded."),
    "load_s": (_COUNTER, "pliant_adapter_load_seconds", "What loads took, failed ones too, summed up."),
    "bytes": (_GAUGE, "pliant_adapter_bytes_resident", "Memory of adapters that are loaded or being loaded."),
}
_CLASSES = {
    "waiting": (_GAUGE, "pliant_queue_requests_waiting", "Requests that wait, by queue, 0 for the smallest."),
    "admitted": (_COUNTER, "pliant_queue_requests_admitted", "Requests that left their queue for a slot."),
    "waited_s": (_COUNTER, "pliant_queue_wait_seconds", "What these had waited, summed up."),
}

_Table = Mapping[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str]]
_Rows = list[tuple[tuple[str, ...], Mapping[str, Any]]]


def llm_metrics(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """What "/stats" says of language models and adapters, for Prometheus."""
    replicas: _Rows = [
        ((service, replica), report)
        for service, view in stats["language_models"].items()
        for replica, report in view["replicas"].items()
    ]
    yield from _families(_REPLICA, replicas)
    yield from _families(_PREDICTOR, [(labels, report["predictor"]) for labels, report in replicas])
    adapters = [(labels, report["adapters"]) for labels, report in replicas]
    yield from _families(_ADAPTERS, adapters)
    resident = _GAUGE("pliant_adapters_resident", "Adapters that are in the replica's memory.", labels=_labels())
    evictions = _COUNTER(
        "pliant_adapter_cache_evictions", "Adapters that left the memory, by why.", labels=_labels("reason")
    )
    for labels, report in adapters:
        resident.add_metric(labels, len(report["resident"]))
        for reason, count in report["evictions"].items():
            evictions.add_metric((*labels, reason), count)
    yield resident
    yield evictions
    classes: _Rows = [
        ((*labels, str(index)), one) for labels, report in replicas for index, one in enumerate(report["classes"])
    ]
    yield from _families(_CLASSES, classes, "class")
    registered = _GAUGE("pliant_adapters_registered", "Adapters that clients may name.", labels=("service",))
    for service, count in stats["adapters"].get("registered", {}).items():
        registered.add_metric((service,), count)
    yield registered


def _families(table: _Table, rows: _Rows, *more: str) -> Iterator[Metric]:
    for key, (family, name, description) in table.items():
        made = family(name, description, labels=_labels(*more))
        for labels, values in rows:
            made.add_metric(labels, values[key])
        yield made


def _labels(*more: str) -> tuple[str, ...]:
    return ("service", "replica", *more)
