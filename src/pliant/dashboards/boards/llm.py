"""Language models."""

from __future__ import annotations

from pliant.dashboards.boards.promql import SERVICE, quantile, rate, total
from pliant.dashboards.grafana import Dashboard, Panel, Query, Row

_HITS, _MISSES = (rate(f"pliant_adapter_cache_{which}_total") for which in ("hits", "misses"))

LANGUAGE_MODELS = Dashboard(
    "llm",
    "pliant: language models",
    "pliant_llm_answers_total",
    (
        Row(
            "What clients see",
            (
                Panel(
                    "Time to the first token, 99th percentile",
                    (Query(quantile(0.99, "ray_pliant_time_to_first_token_seconds")),),
                    "From arrival in the gateway.",
                    "s",
                ),
                Panel(
                    "Time to the first token, median, by rank of the adapter",
                    (
                        Query(
                            quantile(0.5, "ray_pliant_time_to_first_token_seconds", "service", "rank"),
                            "{{service}} rank {{rank}}",
                        ),
                    ),
                    "0 is without an adapter.",
                    "s",
                ),
                Panel(
                    "Time for each further token, 99th percentile",
                    (Query(quantile(0.99, "ray_pliant_time_per_output_token_seconds")),),
                    "Mean of an answer.",
                    "s",
                ),
            ),
        ),
        Row(
            "Work",
            (
                Panel(
                    "Tokens a second",
                    (
                        Query(rate("ray_pliant_prompt_tokens_total"), "{{service}} read"),
                        Query(rate("ray_pliant_generated_tokens_total"), "{{service}} generated"),
                    ),
                    "Of prompts, and of answers.",
                ),
                Panel(
                    "Running and waiting",
                    (
                        Query(total("pliant_llm_requests_running"), "{{service}} running"),
                        Query(total("pliant_llm_requests_waiting"), "{{service}} waiting"),
                    ),
                    "Requests. Waiting for long: add replicas.",
                    "none",
                ),
                Panel(
                    "Mean wait by queue",
                    (
                        Query(
                            f"{rate('pliant_queue_wait_seconds_total', 'service', 'class')} / "
                            f"{rate('pliant_queue_requests_admitted_total', 'service', 'class')}",
                            "{{service}} {{class}}",
                        ),
                    ),
                    "0 holds the smallest requests.",
                    "s",
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "Live tokens",
                    (Query(total("pliant_llm_live_tokens")),),
                    "That requests hold or may come to hold.",
                    "none",
                ),
                Panel(
                    "Adapters in memory",
                    (Query(total("pliant_adapter_bytes_resident"), "{{service}}"),),
                    "In memory that no request uses.",
                    "bytes",
                ),
                Panel(
                    "Adapter was there",
                    (Query(f"{_HITS} / ({_HITS} + {_MISSES})"),),
                    "Share of requests with an adapter.",
                    "percentunit",
                ),
                Panel(
                    "Adapters loaded and evicted",
                    (
                        Query(rate("pliant_adapter_loads_total"), "{{service}} loaded"),
                        Query(
                            rate("pliant_adapter_cache_evictions_total", "service", "reason"), "{{service}} {{reason}}"
                        ),
                        Query(rate("pliant_adapter_load_failures_total"), "{{service}} failed"),
                    ),
                    "A second. Failures: /stats has the reason under problems.",
                ),
                Panel(
                    "Length of answers predicted in the right class",
                    (Query(f"avg by (service) (pliant_output_length_accuracy{{{SERVICE}}})"),),
                    "The scheduler's queues depend on it.",
                    "percentunit",
                ),
            ),
        ),
    ),
)
