"""Vision transformers."""

from __future__ import annotations

from pliant.dashboards.boards.promql import OVER, SERVICE, rate, total
from pliant.dashboards.grafana import Dashboard, Panel, Query, Row

_COMPUTED = rate("pliant_vision_batch_images_total")

VISION = Dashboard(
    "vision",
    "pliant: vision transformers",
    "pliant_vision_tasks_registered",
    (
        Row(
            "Work",
            (
                Panel(
                    "Images by fate",
                    (Query(rate("pliant_vision_images_total", "service", "fate"), "{{service}} {{fate}}"),),
                    "evicted: gave way to others. shed: refused at once.",
                    "reqps",
                ),
                Panel(
                    "Utility a second",
                    (Query(rate("pliant_vision_utility_total")),),
                    "Expected, of answers in time: what the scheduler maximises.",
                ),
                Panel(
                    "Tokens added to a layer",
                    (
                        Query(
                            f"sum by (service, gamma) (rate(pliant_vision_batch_images_total{{{SERVICE}}}{OVER}))",
                            "{{service}} {{gamma}}",
                        ),
                    ),
                    "Images a second by gamma: negative ones merge tokens, for speed.",
                    "reqps",
                ),
            ),
        ),
        Row(
            "Engine",
            (
                Panel(
                    "Images in a batch",
                    (Query(f"{_COMPUTED} / {rate('pliant_vision_batches_total')}"),),
                    "On average.",
                ),
                Panel(
                    "Waiting",
                    (Query(total("pliant_vision_images_waiting")),),
                    "Images.",
                    "none",
                ),
                Panel(
                    "Slower than profiled",
                    (Query(f"max by (service) (pliant_vision_slowdown{{{SERVICE}}})"),),
                    "Above 1.5 for long: something else uses the device.",
                ),
                Panel(
                    "Choosing the next batch, 99th percentile",
                    (Query(f"max by (service) (pliant_vision_decision_p99_milliseconds{{{SERVICE}}})"),),
                    "Of late.",
                    "ms",
                ),
            ),
        ),
    ),
)
