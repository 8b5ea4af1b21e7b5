"""What all services do together."""

from __future__ import annotations

from pliant.dashboards.boards.promql import ANSWERED, OVER, REQUESTS, SERVICE, quantile, rate, share, total
from pliant.dashboards.grafana import Dashboard, Panel, Query, Row


def _of_all(outcomes: str) -> str:
    """Share of requests that ended so, of all services together."""
    ended = f'sum(rate({REQUESTS}{{{SERVICE}, outcome=~"{outcomes}"}}{OVER}))'
    return f"({ended} or vector(0)) / sum(rate({REQUESTS}{{{SERVICE}}}{OVER}))"


CLUSTER = Dashboard(
    "cluster",
    "pliant: the cluster",
    REQUESTS,
    (
        Row(
            "Now",
            (
                Panel(
                    "Answered in time",
                    (
                        Query(
                            f"1 - (sum(rate(ray_pliant_slo_violations_total{{{SERVICE}}}{OVER})) or vector(0)) / "
                            f"sum(rate({REQUESTS}{{{SERVICE}, {ANSWERED}}}{OVER}))",
                            "in time",
                        ),
                    ),
                    "Of answered requests. Below 99%: look for the service whose latency rises below.",
                    "percentunit",
                    "stat",
                    4,
                ),
                Panel(
                    "Answers a second",
                    (Query(f"sum(rate({REQUESTS}{{{SERVICE}, {ANSWERED}}}{OVER}))", "answers"),),
                    "Of all services.",
                    "reqps",
                    "stat",
                    4,
                ),
                Panel(
                    "Refused for lack of room",
                    (Query(_of_all("shed"), "shed"),),
                    "Add replicas, or raise `max`, of the service that sheds.",
                    "percentunit",
                    "stat",
                    4,
                ),
                Panel(
                    "Errors",
                    (Query(_of_all("failed|unavailable"), "errors"),),
                    "Requests that no replica could answer, or that broke. The gateway's log names each by request id.",
                    "percentunit",
                    "stat",
                    4,
                ),
                Panel(
                    "Replicas",
                    (Query(f"sum(pliant_service_replicas{{{SERVICE}}})", "replicas"),),
                    "That gateways know.",
                    "none",
                    "stat",
                    4,
                ),
                Panel(
                    "Services that cannot answer",
                    (Query(f"count(pliant_service_ready{{{SERVICE}}} == 0) or vector(0)", "not ready"),),
                    "`/v2/health/ready` says what each waits for.",
                    "none",
                    "stat",
                    4,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    "Answers by service",
                    (Query(rate(REQUESTS, where=ANSWERED)),),
                    "Texts, images and answers of language models, each once.",
                    "reqps",
                ),
                Panel(
                    "All others by outcome",
                    (Query(rate(REQUESTS, "service", "outcome", where='outcome!="ok"'), "{{service}} {{outcome}}"),),
                    "shed, too_late: too little room. unavailable, failed: something is down. rejected: clients err.",
                    "reqps",
                ),
                Panel(
                    "Share answered late",
                    (Query(share(rate("ray_pliant_slo_violations_total"), rate(REQUESTS, where=ANSWERED))),),
                    "After the SLO of the request.",
                    "percentunit",
                ),
                Panel(
                    "Latency, median",
                    (Query(quantile(0.5, "ray_pliant_request_latency_seconds")),),
                    "From arrival in the gateway to the whole answer.",
                    "s",
                ),
                Panel(
                    "Latency, 98th percentile",
                    (Query(quantile(0.98, "ray_pliant_request_latency_seconds")),),
                    "The paper's tail.",
                    "s",
                ),
                Panel(
                    "Other replicas asked",
                    (Query(rate("ray_pliant_retries_total", "service", "reason"), "{{service}} {{reason}}"),),
                    "lost: a replica died or broke down. stalled: it took much longer than predicted. Others: normal.",
                    "reqps",
                ),
            ),
        ),
        Row(
            "Edge",
            (
                Panel(
                    "Answers that no gateway gave",
                    (
                        Query("sum by (status) (rate(ray_pliant_edge_answers_total[$__rate_interval]))", "{{status}}"),
                        Query("sum(rate(ray_pliant_edge_retries_total[$__rate_interval]))", "asked another gateway"),
                    ),
                    "By HAProxy: 5xx, no gateway was there or one broke off; 4xx, what came was no HTTP, or too slow.",
                    "reqps",
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel(
                    "Replicas by service",
                    (Query(total("pliant_service_replicas")),),
                    "That the gateway knows.",
                    "none",
                ),
                Panel(
                    "Left alone",
                    (Query(total("pliant_service_replicas_ejected")),),
                    "Replicas that failed again and again, and get no requests for a while. Look at their log.",
                    "none",
                ),
                Panel(
                    "Problems that need a person",
                    (Query(total("pliant_service_problems")), Query("1 - pliant_planner_reached", "planner away")),
                    "Adapters, tasks or promises; /stats says which.",
                    "none",
                ),
            ),
        ),
    ),
)
