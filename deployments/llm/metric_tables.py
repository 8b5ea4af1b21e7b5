"""What replicas of language models report, as metrics: the same on Ray's pages and on the gateway's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from pliant.deployments.serving.metric_table import Described, Rows, Table, families, family, replicas_of

REPLICA: Table = {
    "live": Described(False, "pliant_llm_requests_running", "Requests that have a slot."),
    "waiting": Described(False, "pliant_llm_requests_waiting", "Requests that wait for a slot."),
    "live_tokens": Described(False, "pliant_llm_live_tokens", "Tokens that its requests hold or may come to hold."),
    "tokens_per_s": Described(False, "pliant_llm_tokens_per_second", "Tokens that it generates."),
    "served": Described(True, "pliant_llm_answers", "Answers that it completed."),
    "squashed": Described(True, "pliant_requests_squashed", "Requests put back after they had passed others."),
    "preempted": Described(True, "pliant_llm_preemptions", "Requests put back for others that had come before them."),
    "bypassed": Described(True, "pliant_requests_bypassed", "Requests that passed others that waited for memory."),
}
PREDICTOR: Table = {
    "accuracy": Described(
        False, "pliant_output_length_accuracy", "Share of answers whose length was predicted in the right class."
    ),
    "error": Described(
        False, "pliant_output_length_error", "Mean of |predicted - real| / real over the lengths of answers."
    ),
}
MEMORY: Table = {
    "evicted": Described(True, "pliant_llm_prefix_pages_evicted", "Pages of prefixes that made room for something."),
}
PREFIX_TOKENS: Table = {
    "tokens": Described(True, "pliant_llm_prefix_tokens", "Tokens of prompts, by whether they were there already."),
}
PAGES: Table = {
    "pages": Described(False, "pliant_llm_pages", "Pages, by whether requests or prefixes alone have them.")
}
ADAPTERS: Table = {
    "hits": Described(True, "pliant_adapter_cache_hits", "Requests whose adapter was in memory when they came."),
    "misses": Described(True, "pliant_adapter_cache_misses", "Requests whose adapter was not."),
    "loads": Described(True, "pliant_adapter_loads", "Adapters that were loaded."),
    "failed_loads": Described(True, "pliant_adapter_load_failures", "Adapters that could not be loaded."),
    "load_s": Described(True, "pliant_adapter_load_seconds", "What loads took, failed ones too, summed up."),
    "host_hits": Described(True, "pliant_adapter_host_hits", "Loads that read no disk, as the host's memory had it."),
    "host_bytes": Described(False, "pliant_adapter_host_bytes", "What adapters take of the host's memory (host_mb)."),
    "bytes": Described(False, "pliant_adapter_bytes_resident", "Memory of adapters that are loaded or being loaded."),
}
CLASSES: Table = {
    "waiting": Described(
        False, "pliant_queue_requests_waiting", "Requests that wait, by queue, 0 for the smallest requests'."
    ),
    "admitted": Described(True, "pliant_queue_requests_admitted", "Requests that left their queue for a slot."),
    "waited_s": Described(True, "pliant_queue_wait_seconds", "What these had waited, summed up."),
}
RESIDENT = Described(False, "pliant_adapters_resident", "Adapters that are in memory.")
EVICTIONS = Described(True, "pliant_adapter_cache_evictions", "Adapters that left the memory, by why.")


def of_replica(report: Mapping[str, Any]) -> dict[str, Any]:
    """What `REPLICA` names, of a report."""
    return {**report, "live_tokens": sum(report.get("held", {}).values())}


def prefix_tokens(memory: Mapping[str, Any]) -> Rows:
    """What `PREFIX_TOKENS` names, by result."""
    return [((result,), {"tokens": memory[key]}) for result, key in (("hit", "hit"), ("miss", "missed")) if memory]


def pages(memory: Mapping[str, Any]) -> Rows:
    """What `PAGES` names, by state."""
    return [((state,), {"pages": memory[state]}) for state in ("live", "idle") if memory]


def llm_metrics(services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of language models and adapters, for Prometheus."""
    replicas = replicas_of(services)
    yield from families(REPLICA, [(labels, of_replica(report)) for labels, report in replicas])
    yield from families(PREDICTOR, [(labels, report.get("predictor", {})) for labels, report in replicas])
    memories = [(labels, report.get("memory", {})) for labels, report in replicas]
    yield from families(MEMORY, memories)
    for table, rows_of, label in ((PREFIX_TOKENS, prefix_tokens, "result"), (PAGES, pages, "state")):
        rows = [((*labels, *one), values) for labels, memory in memories for one, values in rows_of(memory)]
        yield from families(table, rows, label)
    adapters = [(labels, report.get("adapters", {})) for labels, report in replicas]
    yield from families(ADAPTERS, adapters)
    resident, evictions = family(RESIDENT), family(EVICTIONS, "reason")
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
    yield from families(CLASSES, classes, "class")
    registered = GaugeMetricFamily("pliant_adapters_registered", "Adapters that clients may name.", labels=("service",))
    for service, view in services.items():
        if "adapters" in view:
            registered.add_metric((service,), view["adapters"])
    yield registered
