"""What happens when things break: nothing is lost, hung, or answered wrongly."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import yaml
from support.waiting import PATIENT_MS, wait_until

from e2e.cluster import Cluster
from e2e.load import Load

TEXTS = {length: "generator " * (length - 10) for length in (30, 90, 400)}
"""By their approximate number of tokens: one for each runtime."""
LEAVING = 8
"""Clients that leave."""
MOST_TEXTS = 64
"""Of a request."""


def texts(cluster: Cluster, clients: int, *lengths: int) -> Load:
    """Clients that send texts of these lengths in turn; of all, if there are none."""
    sent = [TEXTS[length] for length in lengths or TEXTS]

    def send(http: httpx.Client, number: int) -> str:
        body = {"inputs": sent[number % len(sent)], "parameters": {"slo_ms": PATIENT_MS}}
        response = http.post("/models/topics", json=body)
        return "ok" if response.status_code == 200 else f"{response.status_code} {response.text}"

    return Load(cluster.address, clients, send)


def held(cluster: Cluster) -> list[int]:
    """The lengths that the replicas hold, in rising order; 0 for one that switches."""
    return sorted(report["max_length"] for report in cluster.stats().values())


def homes(cluster: Cluster) -> list[int]:
    """The lengths of the texts that the replicas are to have first, in rising order."""
    return sorted(report["home"] for report in cluster.stats().values())


def wait_for(cluster: Cluster, reached: Callable[[list[int]], bool]) -> None:
    """Until the lengths that replicas hold are as wanted."""
    wait_until(lambda: reached(held(cluster)), cluster.progress)


def whole(lengths: list[int]) -> bool:
    """Three replicas serve, and one of them the longest texts."""
    return len(lengths) == 3 and lengths[0] > 0 and lengths[-1] == 512


def outstanding(cluster: Cluster) -> int:
    return sum(report["outstanding"] for report in cluster.stats().values())


def served(cluster: Cluster) -> int:
    return sum(report["served"] for report in cluster.stats().values())


def time_for(cluster: Cluster, requests: int) -> float:
    """The slo_ms within which a replica can answer so many of the longest texts, as fast as this machine is now."""

    def service_s() -> list[float]:
        return [report["service_s"] for report in cluster.stats().values() if report["max_length"] == 512]

    return requests * min(wait_until(service_s, cluster.progress)) * 1e3


def overload(cluster: Cluster) -> httpx.Response:
    """More texts at once than three replicas can answer in time, however fast they are."""
    return cluster.classify([TEXTS[400]] * MOST_TEXTS, slo_ms=time_for(cluster, requests=10))


def test_replicas_follow_the_texts_that_arrive_and_no_request_fails(cluster: Cluster) -> None:
    load = texts(cluster, 8, 30)
    wanted = {"64": 3, "128": 0, "512": 0}
    with load.running():
        wait_until(lambda: homes(cluster) == [64] * 3 and cluster.plan().get("replicas") == wanted, cluster.progress)
    plan = cluster.plan()
    longer = texts(cluster, 8, 400)
    with longer.running():
        wait_until(lambda: homes(cluster) == [512] * 3, cluster.progress)
    assert set(load.outcomes + longer.outcomes) == {"ok"}, (load.outcomes, longer.outcomes)
    assert cluster.plan()["version"] > plan["version"]


def test_overload_is_shed_with_a_time_to_come_back(cluster: Cluster) -> None:
    response = overload(cluster)
    assert response.status_code == 429, response.text
    assert int(response.headers["Retry-After"]) >= 1
    assert "too busy" in response.json()["error"]
    assert cluster.classify(TEXTS[400], slo_ms=PATIENT_MS).status_code == 200


def test_an_slo_that_cannot_be_met_is_refused_at_once(cluster: Cluster) -> None:
    response = cluster.classify(TEXTS[400], slo_ms=0.01)
    assert response.status_code == 429
    assert "even when idle" in response.json()["error"]


def test_clients_that_leave_free_their_places(cluster: Cluster) -> None:
    before = served(cluster)
    body = json.dumps({"inputs": [TEXTS[400]] * MOST_TEXTS, "parameters": {"slo_ms": PATIENT_MS}}).encode()
    head = f"POST /models/topics HTTP/1.1\r\nHost: {cluster.host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = cluster.host.split(":")
    with contextlib.ExitStack() as connections, stopped(cluster.replica_processes()):
        for _ in range(LEAVING):
            connections.enter_context(socket.create_connection((host, int(port)))).sendall(head + body)
        wait_until(lambda: outstanding(cluster) > MOST_TEXTS, lambda: outstanding(cluster))
        connections.close()
        wait_until(lambda: outstanding(cluster) == 0, lambda: outstanding(cluster))
    time.sleep(3)  # for the replicas' reports: one that is late can hide a mistake, but make none
    assert served(cluster) < before + LEAVING * MOST_TEXTS, "their texts were computed anyway"


@contextlib.contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """None of them computes anything meanwhile, however fast the machine is."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # Serve found it silent for too long
                process.resume()


def changed(cluster: Cluster, **options: object) -> Path:
    """The cluster's configuration with other options for the topics service."""
    content = yaml.safe_load(cluster.path.read_text())
    content["applications"][0]["args"]["services"]["topics"] |= options
    path = cluster.path.with_name("changed.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_bad_configuration_says_why_and_keeps_serving(cluster: Cluster) -> None:
    cluster.deploy(changed(cluster, slo_ms="soon"))

    def status() -> str:
        said = cluster.serve("status")
        return said if "DEPLOY_FAILED" in said else ""

    message = yaml.safe_load(wait_until(status))["applications"]["pliant"]["message"]
    assert message.splitlines()[-1].startswith("services.topics.slo_ms: got 'soon'; input should be a valid number")
    assert "Traceback" not in message
    assert cluster.classify("still serving").status_code == 200


def test_a_changed_configuration_keeps_serving_and_then_scales(cluster: Cluster) -> None:
    """`serve deploy` of a service with another objective, and then with another size: first each of its replicas is
    replaced, then none; others' stay, and no request fails."""
    before, others = set(cluster.stats()), set(cluster.stats("topics-small"))
    load = texts(cluster, 4)

    def replaced() -> bool:
        try:
            return not set(cluster.stats()) & before and whole(held(cluster))
        except httpx.HTTPError:
            return False

    def may_grow() -> bool:
        try:
            return cluster.get("/stats")["services"]["topics"]["replica_range"] == [3, 4]
        except httpx.HTTPError:
            return False

    with load.running():
        cluster.deploy(changed(cluster, slo_ms=999))
        wait_until(replaced, cluster.progress)
        after = set(cluster.stats())
        cluster.deploy(changed(cluster, slo_ms=999, replicas={"min": 3, "max": 4}))
        wait_until(lambda: may_grow() and whole(held(cluster)), cluster.progress)
        load.go_on()
    assert set(load.outcomes) == {"ok"}, load.outcomes
    assert after <= set(cluster.stats())
    assert set(cluster.stats("topics-small")) == others
    scaled, statuses = threading.Event(), Counter[int]()

    def ask(_index: int) -> None:
        while not scaled.is_set():
            statuses[overload(cluster).status_code] += 1

    with ThreadPoolExecutor(4) as pool:
        clients = pool.map(ask, range(4))
        try:
            wait_until(lambda: len(cluster.stats()) == 4, cluster.progress)
        finally:
            scaled.set()
        list(clients)
    assert {429} <= set(statuses) <= {200, 429}, statuses
