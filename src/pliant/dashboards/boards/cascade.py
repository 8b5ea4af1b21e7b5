"""Cascades."""

from __future__ import annotations

from pliant.dashboards.boards.promql import SERVICE, rate, share, total
from pliant.dashboards.grafana import Dashboard, Panel, Query, Row

CASCADES = Dashboard(
    "cascade",
    "pliant: cascades",
    "pliant_cascade_ready",
    (
        Row(
            "Flow",
            (
                Panel(
                    "Answers by the last level that read",
                    (Query(rate("ray_pliant_cascade_answers_total", "service", "level"), "{{service}} {{level}}"),),
                    "The first level should answer most.",
                    "reqps",
                ),
                Panel(
                    "Sent on",
                    (
                        Query(
                            f"{rate('ray_pliant_cascade_rerouted_total', 'service', 'level')} / on (service) "
                            f"group_left () {rate('ray_pliant_cascade_answers_total')}",
                            "{{service}} {{level}}",
                        ),
                        Query(
                            total("pliant_cascade_profiled_reroute_share", "service", "level"),
                            "{{service}} {{level}}, profiled",
                        ),
                    ),
                    "Share of texts, beside the profile's. Apart for long: the texts have changed; profile again.",
                    "percentunit",
                ),
                Panel(
                    "Words left out",
                    (
                        Query(
                            share(rate("ray_pliant_cascade_words_pruned_total"), rate("ray_pliant_cascade_words_total"))
                        ),
                    ),
                    "Of texts that a further level read.",
                    "percentunit",
                ),
            ),
        ),
        Row(
            "Promise",
            (
                Panel(
                    "Accuracy on the labelled texts",
                    (Query(total("pliant_cascade_profiled_accuracy")),),
                    "Of what serves.",
                    "percentunit",
                ),
                Panel(
                    "Kept, and drifting",
                    (
                        Query(total("pliant_cascade_promise_kept"), "{{service}} kept"),
                        Query(f"max by (service) (pliant_cascade_reroute_drifting{{{SERVICE}}})", "{{service}} drifts"),
                        Query(
                            f"max by (service) (pliant_cascade_answers_drifting{{{SERVICE}}})",
                            "{{service}} is wrong more often",
                        ),
                    ),
                    "1 is yes.",
                    "none",
                ),
                Panel(
                    "Early answers that the last level would give otherwise",
                    (
                        Query(
                            f"{rate('ray_pliant_cascade_checks_differing_total', 'service')} / "
                            f"{rate('ray_pliant_cascade_checks_total', 'service')}",
                            "{{service}}",
                        ),
                        Query(total("pliant_cascade_profiled_difference"), "{{service}}, in the profile"),
                    ),
                    "Of those that it was asked for, too.",
                    "percentunit",
                ),
                Panel(
                    "Degraded",
                    (
                        Query(
                            rate("ray_pliant_cascade_degraded_total", "service", "level", "reason"),
                            "{{service}} without {{level}}: {{reason}}",
                        ),
                    ),
                    "Answers without a level that was to read the text.",
                    "reqps",
                ),
            ),
        ),
    ),
)
