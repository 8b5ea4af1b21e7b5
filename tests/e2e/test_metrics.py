"""What operators watch: Ray's own Prometheus endpoint, the gateway's, and /stats."""

from __future__ import annotations

from support.waiting import wait_until

from e2e.cluster import Cluster

NEEDS = ("topics",)


def test_metrics_reach_rays_endpoint(cluster: Cluster) -> None:
    assert cluster.classify("word " * 600).status_code == 422
    assert cluster.classify("some text").status_code == 200
    wanted = [
        ("pliant_requests_total{", 'service="topics"', 'outcome="ok"'),
        ("pliant_requests_total{", 'service="topics"', 'outcome="rejected"'),
        ("pliant_request_latency_seconds_bucket{", 'service="topics"', 'kind="encoder"'),
        ("pliant_requests_waiting{", 'service="topics"', 'runtime="512"'),
    ]

    def missing() -> list[tuple[str, ...]]:
        lines = cluster.ray_metrics()
        return [parts for parts in wanted if not any(all(part in line for part in parts) for line in lines)]

    wait_until(lambda: not missing(), missing)


def test_the_gateway_renders_the_plan(cluster: Cluster) -> None:
    def shown() -> bool:
        lengths = {report["max_length"] for report in cluster.stats().values()}
        page = cluster.metrics()
        return all(f'runtime="{length}",service="topics"}} {length}.0' in page for length in lengths)

    wait_until(shown, cluster.progress)
    page = cluster.metrics()
    assert "pliant_requests_served_total" in page
    assert 'pliant_moves_total{service="topics"} ' in page


def test_stats_tell_what_each_replica_holds_and_how_fast_it_is(cluster: Cluster) -> None:
    for _ in range(5):
        cluster.classify("some text")
    wait_until(
        lambda: any(report["served"] and report["p98_ms"] for report in cluster.stats().values()), cluster.progress
    )
    assert {report["max_length"] for report in cluster.stats().values()} <= {0, 64, 128, 512}
