"""Every fault of a replica, of every kind: nobody notices, and each request is counted once."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.images import base64_png
from support.waiting import PATIENT_MS, wait_until

from e2e.cluster import Cluster, runs
from e2e.faults import FAULTS, Fault, ordered
from e2e.given_cascades import FIRST, STRICT
from e2e.load import Load
from pliant.zoo import corpus, digits

CLIENTS = 4
TOKENS = 100
"""Of a language model's answer: many more than are computed until a fault is ordered."""
SILENT: tuple[Fault, ...] = ("stopped", "slow")
"""Faults that nobody hears of: another replica is asked when it takes too long."""
WORDS = ("generator", "exception", "string", "import")
SHORT = sorted((text.text for text in corpus.held_out()), key=len)[:CLIENTS]
"""Any replica takes them."""


def text(service: str, texts: list[str]) -> Ask:
    def ask(http: httpx.Client, index: int, _slo_ms: float) -> Any:
        body = {"inputs": texts[index], "parameters": {"slo_ms": PATIENT_MS, "top_k": 1}}
        answer = http.post(f"/models/{service}", json=body)
        return answer.json()[0][0]["label"] if answer.status_code == 200 else answer.text

    return ask


def completion(model: str) -> Ask:
    """Greedy or sampled with a seed, whole or streamed."""

    def ask(http: httpx.Client, index: int, _slo_ms: float) -> str:
        body = {
            "model": model,
            "prompt": f"The {WORDS[index]} statement",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": index % 2,
            "seed": index,
            "stream": index >= CLIENTS // 2,
        }
        answer = http.post("/v1/completions", json=body)
        if answer.status_code != 200 or not body["stream"]:
            return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    return ask


@cache
def surest(address: httpx.URL) -> list[str]:
    """CLIENTS images, encoded, of which the model is so sure that it says the same with fewer or more tokens."""
    images = [base64_png(pixels) for pixels in digits.held_out().images[:64]]
    body = {"inputs": images, "parameters": {"task": "digit", "slo_ms": PATIENT_MS, "top_k": 1}}
    answers = httpx.post(address.join("/models/digits"), json=body, timeout=None).raise_for_status().json()
    scores = [answer[0]["score"] for answer in answers]
    return [images[index] for index in sorted(range(len(images)), key=scores.__getitem__)[-CLIENTS:]]


def image(http: httpx.Client, index: int, slo_ms: float) -> Any:
    body = {"inputs": surest(http.base_url)[index], "parameters": {"task": "digit", "slo_ms": slo_ms, "top_k": 1}}
    answer = http.post("/models/digits", json=body)
    return answer.json()[0]["label"] if answer.status_code == 200 else answer.text


Ask = Callable[[httpx.Client, int, float], Any]
"""The answer to one of CLIENTS requests, or else why there is none; with an slo_ms, where that says how long a replica
is waited for."""


@dataclass(frozen=True)
class Kind:
    broken: str
    """The service whose replica has the fault."""
    replicas: int
    """Of that."""
    asked: Mapping[str, Ask]
    """Services and how clients ask them: itself, or those that have it answer, which counts there, too."""


KINDS = {
    "encoder": Kind("topics", 3, {"topics": text("topics", [word * 3 for word in WORDS])}),
    "cascade": Kind(FIRST, 2, {STRICT: text(STRICT, SHORT)}),
    "llm": Kind("chat", 2, {"chat": completion("chat")}),
    "route, llm-cascade": Kind("chat", 2, {"ask": completion("ask"), "answers": completion("answers")}),
    "vision": Kind("digits", 2, {"digits": image}),
    "echo": Kind("echo", 2, {"echo": text("echo", list(WORDS))}),
}
SERVICES = [service for kind in KINDS.values() for service in kind.asked]


class Undisturbed:
    """What is answered when nothing breaks, and an slo_ms that this takes nothing near."""

    def __init__(self, cluster: Cluster, ask: Ask) -> None:
        with httpx.Client(base_url=cluster.address, timeout=None) as http:
            started = time.monotonic()
            self.answers = [ask(http, index, PATIENT_MS) for index in range(CLIENTS)]
            self.slo_ms = max(10e3, 50e3 * (time.monotonic() - started) / CLIENTS)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Undisturbed]:
    """By service, once it is known."""
    return {}


def whole(cluster: Cluster, kind: Kind) -> bool:
    """All replicas are there, may be chosen, and are called over their lines."""
    reports = cluster.stats(kind.broken).values()
    usable = [report for report in reports if not report["ejected"] and report["line"] == "open"]
    there = [report for report in usable if report.get("max_length", 1)]
    return len(there) == len(reports) == len(cluster.replica_processes(kind.broken)) == kind.replicas


def requests(cluster: Cluster, service: str) -> Counter[str]:
    """By outcome."""
    return Counter(cluster.get("/stats")["services"][service]["requests"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_replica_breaks_and_no_request_is_lost_changed_or_counted_twice(
    cluster: Cluster, undisturbed: dict[str, Undisturbed], name: str, fault: Fault
) -> None:
    kind = KINDS[name]
    wait_until(lambda: whole(cluster, kind), cluster.progress)
    for service in kind.asked.keys() - undisturbed.keys():
        undisturbed[service] = Undisturbed(cluster, kind.asked[service])

    def counted() -> dict[str, Counter[str]]:
        return {service: requests(cluster, service) for service in kind.asked}

    before = counted()
    replicas = {replica.pid: replica for replica in cluster.replica_processes(kind.broken)}
    loads = {service: load(cluster, ask, undisturbed[service], fault) for service, ask in kind.asked.items()}
    with ExitStack() as asking:
        for each in loads.values():
            asking.enter_context(each.running())
        replica = asking.enter_context(ordered(fault, kind.broken))
        for each in loads.values():
            each.go_on()
        if fault in ("killed", "raises"):
            wait_until(lambda: not runs(replicas[replica]), cluster.progress)
    outcomes = {service: each.outcomes for service, each in loads.items()}
    assert all(set(each) == {"ok"} for each in outcomes.values()), outcomes
    expected = {service: before[service] + outcomes[service] for service in loads}
    wait_until(lambda: all(counted()[service] >= expected[service] for service in loads), cluster.progress)
    assert counted() == expected


def load(cluster: Cluster, ask: Ask, usual: Undisturbed, fault: Fault) -> Load:
    """Clients that find out whether answers are as usual."""
    slo_ms = usual.slo_ms if fault in SILENT else PATIENT_MS

    def send(http: httpx.Client, number: int) -> str:
        index = number % CLIENTS
        answer = ask(http, index, slo_ms)
        return "ok" if answer == usual.answers[index] else f"{answer}, not {usual.answers[index]}"

    return Load(cluster.address, CLIENTS, send)


def test_ray_has_counted_what_the_gateway_has(cluster: Cluster) -> None:
    gateway = {service: requests(cluster, service) for service in SERVICES}

    def ray() -> dict[str, dict[str, Counter[str]]]:
        """By replica of the gateway; other tests kill some."""
        totals: dict[str, dict[str, Counter[str]]] = {}
        for family in text_string_to_metric_families("\n".join(cluster.ray_metrics())):
            for sample in family.samples:
                counted = sample.name.endswith("pliant_requests_total") and sample.labels["deployment"] == "gateway"
                if counted and sample.labels["service"] in gateway:
                    of_replica = totals.setdefault(
                        sample.labels["replica"], {service: Counter() for service in gateway}
                    )
                    of_replica[sample.labels["service"]][sample.labels["outcome"]] += int(sample.value)
        return totals

    wait_until(lambda: gateway in ray().values(), ray)
