"""What happens when things break: nothing is lost, hung, or answered wrongly."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
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

    def __init__(self, cluster: Cluster, clients: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._cluster = cluster
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
        texts = list(TEXTS.values())
        with httpx.Client(timeout=60) as http:
            while not self._stop.is_set():
                body = {"inputs": texts[index % len(texts)], "parameters": {"slo_ms": 20_000}}
                try:
                    response = http.post(f"{self._cluster.address}/models/topics", json=body)
                    outcome = "ok" if response.status_code == 200 else f"{response.status_code} {response.text}"
                except httpx.TransportError as error:
                    outcome = repr(error)
                self.outcomes[outcome] += 1
                index += 1


def wait_for_lengths(cluster: Cluster, lengths: set[int], within_s: float) -> float:
    """Seconds until the gateway's replicas hold exactly `lengths`."""
    started = time.monotonic()
    while {report["max_length"] for report in cluster.stats().values()} != lengths:
        assert time.monotonic() - started < within_s, cluster.stats()
        time.sleep(0.1)
    return time.monotonic() - started


def test_a_killed_replica_loses_no_request_and_comes_back(cluster: Cluster) -> None:
    wait_for_lengths(cluster, {64, 128, 512}, within_s=30)
    before = set(cluster.stats())
    load = Load(cluster, clients=8)
    with load.running():
        time.sleep(2)
        cluster.replica_processes()[0].kill()
        deadline = time.monotonic() + 60
        while len(set(cluster.stats()) & before) != 2 or len(cluster.stats()) != 3:
            assert time.monotonic() < deadline, cluster.stats()
            time.sleep(0.1)
        wait_for_lengths(cluster, {64, 128, 512}, within_s=30)
        time.sleep(1)
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert load.outcomes["ok"] > 50


def test_switching_replicas_under_load_fails_no_request(cluster: Cluster) -> None:
    """The gateway hears of a switch up to two seconds late: until then replicas refuse and the gateway sends again."""
    wait_for_lengths(cluster, {64, 128, 512}, within_s=30)
    held = {replica: report["max_length"] for replica, report in cluster.stats().items()}
    swapped = {replica: {64: 128, 128: 64, 512: 512}[length] for replica, length in held.items()}
    load = Load(cluster, clients=8)
    with load.running():
        for plan in (swapped, held, swapped, held):
            time.sleep(1)
            reports = json.loads(
                cluster.ray(
                    "import json, ray; from ray import serve; ray.init(log_to_driver=False)\n"
                    "handle = serve.get_deployment_handle('topics', 'pliant')\n"
                    f"reports = dict(handle.broadcast('hold', {plan}).results())\n"
                    "print(json.dumps({replica: report['max_length'] for replica, report in reports.items()}))"
                )
            )
            assert reports == plan
        wait_for_lengths(cluster, {64, 128, 512}, within_s=10)
    assert set(load.outcomes) == {"ok"}, load.outcomes


def test_overload_is_shed_with_a_time_to_come_back(cluster: Cluster) -> None:
    with ThreadPoolExecutor(32) as pool:
        responses = list(pool.map(lambda _: cluster.classify(TEXTS[400], slo_ms=300), range(96)))
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
        time.sleep(0.5)
        assert sum(report["outstanding"] for report in cluster.stats().values()) > 10
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


def test_a_changed_configuration_keeps_serving(cluster: Cluster) -> None:
    """`serve deploy` of the same services with another objective: every replica is replaced, no request fails."""
    before = set(cluster.stats())
    load = Load(cluster, clients=4)
    with load.running():
        cluster.deploy(changed(cluster, slo_ms=2000))
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline
            time.sleep(0.5)
            try:
                after = cluster.stats()
            except httpx.HTTPError:
                continue
            held = {report["max_length"] for report in after.values()}
            if not set(after) & before and len(after) == 3 and held == {64, 128, 512}:
                break
        time.sleep(1)
    assert set(load.outcomes) == {"ok"}, load.outcomes
