"""Behind HAProxy: gateways are killed, and no request that is not a stream is lost; streams go on."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.waiting import HANGS_AFTER_S, PATIENT_MS, wait_until

from e2e.cluster import Cluster
from pliant import haproxy

CLIENTS, REQUESTS = 4, 200
BODY = {"inputs": "Return a copy of the string", "parameters": {"slo_ms": PATIENT_MS}}
STREAM = {"model": "chat", "prompt": "The try statement", "max_tokens": 300, "ignore_eos": True, "temperature": 0.8}
HEADERS = {"x-request-id": "one-of-mine"}


@pytest.fixture(autouse=True)
def _haproxy() -> None:
    if not haproxy.environment(None):
        pytest.skip("there is no HAProxy here")


def gateways(cluster: Cluster) -> set[int]:
    return {process.pid for process in cluster.replica_processes("gateway")}


def both_answer(cluster: Cluster) -> None:
    def seen() -> bool:
        answers = (httpx.get(f"{cluster.address}/stats", timeout=HANGS_AFTER_S) for _ in range(8))
        return len({answer.json()["gateway"] for answer in answers if answer.status_code == 200}) == 2

    wait_until(seen, lambda: gateways(cluster))
    cluster.await_ready()


def test_each_gateway_knows_what_all_have_answered(cluster: Cluster) -> None:
    both_answer(cluster)
    for _ in range(8):
        assert httpx.post(f"{cluster.address}/models/topics-small", json=BODY, timeout=HANGS_AFTER_S).status_code == 200

    def agreed() -> bool:
        seen = {}
        for _ in range(8):
            stats = cluster.get("/stats")
            counts = stats["services"]["topics-small"]["requests_by_gateway"].values()
            seen[stats["gateway"]] = sum(each.get("ok", 0) for each in counts)
        return len(seen) == 2 and len(set(seen.values())) == 1 and min(seen.values()) >= 8

    wait_until(agreed, cluster.progress)


def test_a_killed_gateway_loses_no_request(cluster: Cluster) -> None:
    both_answer(cluster)
    sent, victims = itertools.count(), cluster.replica_processes("gateway")
    killed = threading.Event()

    def ask(_: int) -> set[int]:
        statuses = set()
        with httpx.Client(timeout=HANGS_AFTER_S) as http:
            for _ in range(REQUESTS // CLIENTS):
                if next(sent) == REQUESTS // 3:
                    victims[0].kill()
                    killed.set()
                statuses.add(http.post(f"{cluster.address}/models/topics-small", json=BODY).status_code)
        return statuses

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert set().union(*pool.map(ask, range(CLIENTS))) == {200}
    assert killed.is_set()


def events(cluster: Cluster, **headers: str) -> Iterator[tuple[str | None, Any]]:
    """The ids and contents of a stream's events, until it ends or breaks off."""
    url, id, data = f"{cluster.address}/v1/completions", None, ""
    body, given = {**STREAM, "stream": True}, {**HEADERS, **headers}
    try:
        with httpx.stream("POST", url, json=body, headers=given, timeout=HANGS_AFTER_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                id, data = (value, data) if name == "id" else (id, value) if name == "data" else (id, data)
                if not line and data:
                    yield id, None if data == "[DONE]" else json.loads(data)
                    id, data = None, ""
    except httpx.TransportError:
        return


def text(found: list[tuple[str | None, Any]]) -> str:
    return "".join(each["choices"][0]["text"] for _, each in found if each)


def test_a_stream_goes_on_in_another_gateway(cluster: Cluster) -> None:
    both_answer(cluster)
    whole = text(list(events(cluster)))
    begun, stream = [], events(cluster)
    for event in itertools.islice(stream, 5):
        begun.append(event)
    for process in cluster.replica_processes("gateway"):
        process.kill()
    begun += list(stream)
    last = [id for id, _ in begun if id][-1]
    both_answer(cluster)
    later = list(events(cluster, **{"Last-Event-ID": last}))
    assert later[-1] == (None, None)
    assert text(begun) + text(later) == whole


def test_what_haproxy_answers_itself_is_counted(cluster: Cluster) -> None:
    both_answer(cluster)
    host, _, port = cluster.host.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANGS_AFTER_S) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        assert b" 400 " in connection.recv(1000)

    def counted() -> list[str]:
        return [each for each in cluster.ray_metrics() if each.startswith("ray_pliant_edge_answers_total")]

    wait_until(lambda: any('status="4xx"' in each for each in counted()), counted)


@pytest.mark.parametrize("name", ["x-request-id", "x-request-timeout-seconds", "traceparent"])
def test_what_cannot_be_printed_harms_nobody(cluster: Cluster, name: str) -> None:
    answer = httpx.get(f"{cluster.address}/v2/health/live", headers={name: b"\xff"}, timeout=HANGS_AFTER_S)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].isascii()
