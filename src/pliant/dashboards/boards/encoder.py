"""Text classifiers, embeddings and rerankers."""

from __future__ import annotations

from pliant.dashboards.boards.promql import quantile, rate, total
from pliant.dashboards.grafana import Dashboard, Panel, Query, Row

TEXTS = Dashboard(
    "encoder",
    "pliant: text classifiers, embeddings, rerankers",
    "pliant_requests_served_total",
    (
        Row(
            "Work",
            (
                Panel(
                    "Tokens and padding",
                    (
                        Query(rate("ray_pliant_tokens_total"), "{{service}} tokens"),
                        Query(rate("ray_pliant_padding_tokens_total"), "{{service}} padding"),
                    ),
                    "A second. Much padding: lengths do not fit the texts.",
                ),
                Panel(
                    "Texts computed together",
                    (Query(f"{rate('pliant_requests_served_total')} / {rate('pliant_passes_total')}"),),
                    "Texts in a pass. It rises with load.",
                ),
                Panel(
                    "Waiting or running",
                    (Query(total("pliant_requests_waiting", "service", "runtime"), "{{service}} {{runtime}}"),),
                    "In replicas.",
                ),
            ),
        ),
        Row(
            "Plan",
            (
                Panel(
                    "Demand by length",
                    (
                        Query(
                            total("pliant_demand_requests_per_second", "service", "runtime"), "{{service}} {{runtime}}"
                        ),
                    ),
                    "Texts a second for which the runtime is the shortest that fits.",
                    "reqps",
                ),
                Panel(
                    "Planned replicas by length",
                    (Query(total("pliant_planned_replicas", "service", "runtime"), "{{service}} {{runtime}}"),),
                    "What replicas should hold.",
                    "none",
                ),
                Panel(
                    "Demand without a place",
                    (Query(total("pliant_plan_excess_requests_per_second")),),
                    "Above 0: add replicas.",
                    "reqps",
                ),
                Panel(
                    "Predicted and measured latency",
                    (
                        Query(total("pliant_plan_predicted_latency_seconds"), "{{service}} predicted"),
                        Query(quantile(0.5, "ray_pliant_request_latency_seconds"), "{{service}} median"),
                    ),
                    "The prediction is of the mean.",
                    "s",
                ),
                Panel(
                    "Moves",
                    (
                        Query(rate("pliant_moves_total"), "{{service}}"),
                        Query(rate("pliant_failed_moves_total"), "{{service}} failed"),
                    ),
                    "Replicas given another length, a second.",
                ),
                Panel(
                    "Replicas wanted",
                    (
                        Query(total("pliant_wanted_replicas"), "{{service}} wanted"),
                        Query(total("pliant_service_replicas"), "{{service}}"),
                    ),
                    "By autoscaling.",
                    "none",
                ),
            ),
        ),
    ),
)
