"""What happens when things break: nothing is lost, hung, or answered wrongly."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml
from e2e.cluster import Cluster

TEXTS = {length: "generator " * (length - 10) for length in (30, 90, 400)}
"""By their approximate number of tokens: one for each runtime."""


class Load:
    """Clients that send one request after another until stopped, and count how each ended."""

    def __init__(self, cluster: Cluster, clients: int, texts: Sequence[str] = tuple(TEXTS.values())) -> None:
        self.outcomes: Counter[str] = Counter()
        self._cluster = cluster
        self._texts = texts
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = clients

    @contextmanager
    def running(self) -> Iterator[None]:
        clients = [self._pool.submit(self._client, index) for index in range(self._clients)]
        try:
            yield
        finally:
            self._stop.set()
            for client in clients:
                client.result()
            self._pool.shutdown()

    def _client(self, index: int) -> None:
        with httpx.Client(timeout=60) as http:
            while not self._stop.is_set():
                body = {"inputs": self._texts[index % len(self._texts)], "parameters": {"slo_ms": 20_000}}
                try:
                    response = http.post(f"{self._cluster.address}/models/topics", json=body)
                    outcome = "ok" if response.status_code == 200 else f"{response.status_code} {response.text}"
                except httpx.TransportError as error:
                    outcome = repr(error)
                self.outcomes[outcome] += 1
                index += 1


def held(cluster: Cluster) -> list[int]:
    """The lengths that the replicas hold, in rising order; 0 for one that switches."""
    return sorted(report["max_length"] for report in cluster.stats().values())


def wait_for(cluster: Cluster, reached: Callable[[list[int]], bool], within_s: float) -> None:
    """Until the lengths that replicas hold are as wanted."""
    deadline = time.monotonic() + within_s
    while not reached(held(cluster)):
        assert time.monotonic() < deadline, cluster.stats()
        time.sleep(0.1)


def whole(lengths: list[int]) -> bool:
    """Three replicas serve, and one of them the longest texts."""
    return len(lengths) == 3 and lengths[0] > 0 and lengths[-1] == 512


def time_for(cluster: Cluster, requests: int) -> float:
    """The slo_ms within which a replica can answer so many of the longest texts, as fast as this machine is now."""
    service_s = min(report["service_s"] for report in cluster.stats().values() if report["max_length"] == 512)
    return requests * service_s * 1e3


def test_a_killed_replica_loses_no_request_and_comes_back(cluster: Cluster) -> None:
    wait_for(cluster, whole, within_s=30)
    before = set(cluster.stats())
    load = Load(cluster, clients=8)
    with load.running():
        time.sleep(2)
        cluster.replica_processes()[0].kill()
        deadline = time.monotonic() + 60
        while len(set(cluster.stats()) & before) != 2 or len(cluster.stats()) != 3:
            assert time.monotonic() < deadline, cluster.stats()
            time.sleep(0.1)
        wait_for(cluster, whole, within_s=30)
        time.sleep(1)
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert load.outcomes["ok"] > 50


def test_replicas_follow_the_texts_that_arrive_and_no_request_fails(cluster: Cluster) -> None:
    load = Load(cluster, clients=8, texts=[TEXTS[30]])
    with load.running():
        wait_for(cluster, lambda lengths: lengths == [64, 64, 512], within_s=60)
    plan = cluster.plan()
    assert plan["replicas"] == {"64": 2, "128": 0, "512": 1}
    assert plan["last_move_s"] < 5
    longer = Load(cluster, clients=8, texts=[TEXTS[400]])
    with longer.running():
        wait_for(cluster, lambda lengths: lengths == [512, 512, 512], within_s=60)
    assert set(load.outcomes + longer.outcomes) == {"ok"}, (load.outcomes, longer.outcomes)
    assert cluster.plan()["version"] > plan["version"]


def test_overload_is_shed_with_a_time_to_come_back(cluster: Cluster) -> None:
    slo_ms = time_for(cluster, requests=3)
    with ThreadPoolExecutor(32) as pool:
        responses = list(pool.map(lambda _: cluster.classify(TEXTS[400], slo_ms=slo_ms), range(96)))
    statuses = Counter(response.status_code for response in responses)
    assert set(statuses) == {200, 429}, statuses
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["Retry-After"]) >= 1
            assert "too busy" in response.json()["error"]


def test_an_slo_that_cannot_be_met_is_refused_at_once(cluster: Cluster) -> None:
    response = cluster.classify(TEXTS[400], slo_ms=0.01)
    assert response.status_code == 429
    assert "even when idle" in response.json()["error"]


def test_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    served = sum(report["served"] for report in cluster.stats().values())
    body = json.dumps({"inputs": [TEXTS[400]] * 64, "parameters": {"slo_ms": 60_000}}).encode()
    host, port = cluster.host.split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /models/topics HTTP/1.1\r\nHost: {cluster.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + 10
        while sum(report["outstanding"] for report in cluster.stats().values()) <= 10:
            assert time.monotonic() < deadline, cluster.stats()
    deadline = time.monotonic() + 5
    while sum(report["outstanding"] for report in cluster.stats().values()) > 0:
        assert time.monotonic() < deadline, cluster.stats()
        time.sleep(0.1)
    time.sleep(3)
    assert sum(report["served"] for report in cluster.stats().values()) < served + 64, "its texts were computed anyway"


def changed(cluster: Cluster, **options: object) -> Path:
    """The cluster's configuration with other options for the topics service."""
    content = yaml.safe_load(cluster.path.read_text())
    content["applications"][0]["args"]["services"]["topics"] |= options
    path = cluster.path.with_name("changed.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_bad_configuration_says_why_and_keeps_serving(cluster: Cluster) -> None:
    cluster.deploy(changed(cluster, slo_ms="soon"))
    deadline = time.monotonic() + 60
    while "DEPLOY_FAILED" not in (status := cluster.serve("status")):
        assert time.monotonic() < deadline, status
        time.sleep(1)
    message = yaml.safe_load(status)["applications"]["pliant"]["message"]
    assert message.splitlines()[-1].startswith("services.topics.slo_ms: got 'soon'; input should be a valid number")
    assert "Traceback" not in message
    assert cluster.classify("still serving").status_code == 200


def test_a_changed_configuration_keeps_serving_and_then_scales(cluster: Cluster) -> None:
    """`serve deploy` of the same services with another size: every replica is replaced, no request fails."""
    before = set(cluster.stats())
    load = Load(cluster, clients=4)
    with load.running():
        cluster.deploy(changed(cluster, replicas={"min": 3, "max": 4}))
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline
            time.sleep(0.5)
            try:
                after = cluster.stats()
            except httpx.HTTPError:
                continue
            if not set(after) & before and whole(held(cluster)):
                break
        time.sleep(1)
    assert set(load.outcomes) == {"ok"}, load.outcomes

    def overload(_index: int) -> Counter[int]:
        statuses: Counter[int] = Counter()
        while len(cluster.stats()) < 4 and time.monotonic() < deadline:
            statuses[cluster.classify(TEXTS[400], slo_ms=time_for(cluster, requests=3)).status_code] += 1
        return statuses

    deadline = time.monotonic() + 90
    with ThreadPoolExecutor(16) as pool:
        statuses = sum(pool.map(overload, range(16)), Counter())
    assert set(statuses) == {200, 429}, statuses
    assert len(cluster.stats()) == 4, "the service was too busy, and no replica was added"
