"""A kind that is not ours is served by a real cluster as ours are, from its own folder alone."""

from __future__ import annotations

from typing import Any

import httpx
from huggingface_hub import InferenceClient
from support.waiting import HANGS_AFTER_S, wait_until

from e2e.cluster import Cluster

NEEDS = ("echo",)


def say(cluster: Cluster, text: str) -> httpx.Response:
    return httpx.post(f"{cluster.address}/models/echo", json={"inputs": text}, timeout=HANGS_AFTER_S)


def test_it_answers_and_is_counted_once_for_each_text(cluster: Cluster) -> None:
    before = facts(cluster)["requests"]
    client = InferenceClient(model=f"{cluster.address}/models/echo")
    texts = [f"text {number}" for number in range(8)]
    assert [client.text_classification(text)[0].label for text in texts] == texts
    refused = say(cluster, "refuse this")
    assert refused.status_code == 429
    assert refused.json()["error"] == "echo is too busy: it was told to refuse; retry later"
    assert refused.headers["Retry-After"] == "2"
    counted = facts(cluster)["requests"]
    assert counted["ok"] - before.get("ok", 0) == len(texts)
    assert counted["shed"] - before.get("shed", 0) == 1
    wanted = [
        ("pliant_requests_total{", 'service="echo"', 'kind="echo"', f'outcome="{outcome}"')
        for outcome in ("ok", "shed")
    ]

    def shown() -> bool:
        lines = cluster.ray_metrics()
        return all(any(all(part in line for part in parts) for line in lines) for parts in wanted)

    wait_until(shown, cluster.progress)


def test_what_it_adds_is_shown(cluster: Cluster) -> None:
    assert say(cluster, "hello").status_code == 200
    assert facts(cluster)["longest"] >= len("hello")
    assert 'echo_answers_total{replica="' in cluster.metrics()


def test_a_request_is_found_in_the_logs_of_all_that_worked_on_it(cluster: Cluster) -> None:
    body, headers = {"inputs": ["raise", "hello"]}, {"x-request-id": "one-of-mine"}
    answer = httpx.post(f"{cluster.address}/models/echo", json=body, headers=headers, timeout=HANGS_AFTER_S)
    assert (answer.status_code, answer.headers["x-request-id"]) == (503, "one-of-mine")

    def logged() -> bool:
        lines = [line for line in cluster.log_lines() if line.get("request_id") == "one-of-mine"]
        said = {(line["deployment"], line["message"].partition(" ")[2][:17]) for line in lines}
        return {("pliant_gateway", "replica "), ("pliant_echo", "a query broke dow")} <= {
            (deployment, text[:8] if deployment.endswith("gateway") else text) for deployment, text in said
        }

    wait_until(logged, cluster.progress)


def facts(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("/stats")["services"]["echo"]
    return found
