"""A sixth kind, in a folder of its own: from cluster.yaml to answers, and all that every service has."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import MagicMock, call

import httpx
import pytest
from ray.serve._private.build_app import build_app
from support.echo.config import EchoConfig
from support.echo.kind import ECHO
from support.echo.replica import EchoReplica
from support.local_serve import LocalCluster
from support.waiting import HANGS_AFTER_S

from pliant.config.base import ReplicaRange
from pliant.config.cluster import Reader, ServingConfig, check_models
from pliant.deployments import app
from pliant.deployments.kinds import CONFIGS, KINDS, loaded
from pliant.deployments.serving import metrics
from pliant.deployments.serving.keys import hashed
from pliant.deployments.serving.kind import Kind
from pliant.errors import ConfigError

LISTED = (*KINDS, ECHO)
READER = Reader((*CONFIGS, EchoConfig))
KEY = "PLIANT_TEST_KEYS"


def parsed(**changes: Any) -> ServingConfig:
    config = READER.parse({"services": {"echo": {"kind": "echo", "replicas": 2, **changes}}})
    check_models(config)
    return config


class Served:
    """A cluster that serves one echo, and a client of its gateway."""

    def __init__(self, cluster: LocalCluster, http: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.http = http

    async def say(self, *texts: str) -> httpx.Response:
        return await self.http.post("/models/echo", json={"inputs": list(texts)})

    async def stats(self) -> Any:
        """Once the planner has answered, for which a busy machine may take longer than the gateway waits."""
        await self.cluster.report()
        async with asyncio.timeout(HANGS_AFTER_S):
            while True:
                stats = (await self.http.get("/stats")).raise_for_status().json()
                if stats["planner_reached"]:
                    return stats["services"]["echo"]
                await asyncio.sleep(0.05)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, MagicMock]:
    """What is counted through Ray, by name."""
    made: dict[str, MagicMock] = {}
    for sort in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, sort, lambda name, *_, **__: made.setdefault(name, MagicMock()))
    return made


@pytest.fixture
async def served(counters: dict[str, MagicMock], request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """Its parameter is the service's timeout_s."""
    cluster = LocalCluster(parsed(timeout_s=getattr(request, "param", HANGS_AFTER_S)), loaded(LISTED))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(await cluster.gateway()), base_url="http://test"
    ) as http:
        yield Served(cluster, http)


def test_its_keys_are_read_and_its_mistakes_told() -> None:
    config = parsed(cpus=0.5)
    assert config.of(EchoConfig) == {"echo": EchoConfig(kind="echo", replicas=2, cpus=0.5)}
    with pytest.raises(ConfigError) as error:
        parsed(timeout=1)
    assert error.value.problems == [
        "services.echo.timeout: unknown key; did you mean timeout_s? allowed: answer_s, cpus, kind, replicas, timeout_s"
    ]


def test_its_deployment_is_as_it_says() -> None:
    config = parsed(cpus=0.5, replicas={"min": 1, "max": 3})
    built = build_app(app.assemble(config, listed=LISTED), name="pliant")
    deployments = {each.name: each for each in built.deployments}
    assert deployments.keys() == {"gateway", "planner", "echo"}
    echo = deployments["echo"]
    assert issubclass(echo.func_or_class, EchoReplica)
    assert echo.ray_actor_options == {"num_cpus": 0.5}
    assert echo.max_ongoing_requests == 64
    autoscaling = echo._deployment_config.autoscaling_config
    assert autoscaling
    assert ReplicaRange(min=autoscaling.min_replicas, max=autoscaling.max_replicas or 0) == ReplicaRange(min=1, max=3)


async def test_every_protocol_of_texts_finds_it(served: Served) -> None:
    assert (await served.say("hello", "you")).json() == [
        [{"label": "hello", "score": 1.0}],
        [{"label": "you", "score": 1.0}],
    ]
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
    answer = (await served.http.post("/v2/models/echo/infer", json={"inputs": [tensor]})).json()
    assert [output["data"] for output in answer["outputs"]] == [["hello"], [1.0]]
    assert (await served.http.get("/v2/models/echo")).json()["platform"]
    assert (await served.http.get("/v2/health/ready")).status_code == 200
    assert (await served.http.post("/models/other", json={"inputs": "a"})).json() == {
        "error": "no model 'other'; there are: echo"
    }


async def test_routes_of_kinds_without_a_service_say_that_there_is_none(served: Served) -> None:
    assert (await served.http.get("/v1/models")).json() == {"object": "list", "data": []}
    assert (await served.http.get("/v2/repository/models/echo/tasks")).status_code == 404
    loading = await served.http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": "sql"})
    assert loading.status_code == 400
    assert "no language model here takes adapters" in loading.json()["error"]["message"]


async def test_what_is_asked_at_the_same_time_goes_to_all_replicas(served: Served) -> None:
    await asyncio.gather(*(served.say(str(number)) for number in range(10)))
    replicas = (await served.stats())["replicas"]
    assert [report["served"] for report in replicas.values()] == [5, 5]


@pytest.mark.parametrize("kind", loaded(LISTED).values(), ids=lambda kind: kind.name)
def test_replicas_report_between_the_events_of_their_loop(kind: Kind[Any]) -> None:
    """Serve calls what is no coroutine in a thread, in which counts change while they are read."""
    if replica := kind.replica():
        assert inspect.iscoroutinefunction(replica.record_routing_stats)  # type: ignore[attr-defined]


async def test_another_replica_answers_for_one_that_died(served: Served, counters: dict[str, MagicMock]) -> None:
    del served.cluster.replicas["echo"]["echo-0"]
    for number in range(4):
        assert (await served.say(str(number))).status_code == 200
    assert (await served.stats())["requests"] == {"ok": 4}
    retries = counters["pliant_retries_total"].inc.mock_calls
    assert retries == [call(tags={"kind": "echo", "reason": "lost"})] * len(retries)
    assert 1 <= len(retries) <= 3, "then it is ejected"


@pytest.mark.parametrize(
    ("served", "text", "status", "reason", "outcome"),
    [
        (HANGS_AFTER_S, "refuse me", 429, "echo is too busy: it was told to refuse; retry later", "shed"),
        (
            HANGS_AFTER_S,
            "raise this",
            503,
            "2 replicas of echo failed over this request, 3 times in all",
            "unavailable",
        ),
        (2, "slow down", 503, "no replica of echo answered within 2 s", "unavailable"),
    ],
    indirect=["served"],
)
async def test_what_no_replica_answers_is_told_why_and_counted_once(
    served: Served, counters: dict[str, MagicMock], text: str, status: int, reason: str, outcome: str
) -> None:
    answer = await served.say(text)
    assert answer.status_code == status
    assert reason in answer.json()["error"]
    assert int(answer.headers.get("Retry-After", 2)) == (1 if text.startswith("slow") else 2)
    assert (await served.say("hello")).status_code == 200
    assert (await served.stats())["requests"] == {outcome: 1, "ok": 1}
    assert counters["pliant_requests_total"].inc.mock_calls == [
        call(tags={"kind": "echo", "outcome": each}) for each in (outcome, "ok")
    ]


async def test_a_client_that_leaves_is_counted_and_its_replica_is_free_again(served: Served) -> None:
    asking = asyncio.create_task(served.say("slow down"))
    stats = await served.stats()
    while not any(report["outstanding"] for report in stats["replicas"].values()):
        await asyncio.sleep(0)
        stats = await served.stats()
    asking.cancel()
    await asyncio.wait([asking])
    stats = await served.stats()
    assert stats["requests"] == {"cancelled": 1}
    assert not any(report["outstanding"] or report["held"] for report in stats["replicas"].values())


async def test_stats_and_metrics_say_what_they_say_of_all_and_what_it_adds(served: Served) -> None:
    await served.say("hello")
    stats = await served.stats()
    assert stats.pop("replicas").keys() == {"echo-0", "echo-1"}
    assert list(stats.pop("requests_by_gateway").values()) == [{"ok": 1}]
    assert stats == {
        "kind": "echo",
        "ready": True,
        "state": "ready, 2 of 2 replicas",
        "done": None,
        "requests": {"ok": 1},
        "plan": {},
        "gpus": 0,
        "replica_range": [2, 2],
        "longest": 5,
    }
    page = (await served.http.get("/metrics")).text.splitlines()
    counts = [line for line in page if line.startswith("echo_answers_total{")]
    assert sorted(line.split()[-1] for line in counts) == ["0.0", "1.0"]
    assert all('service="echo"' in line for line in counts)


async def test_keys_are_asked_for(monkeypatch: pytest.MonkeyPatch, counters: dict[str, MagicMock]) -> None:
    monkeypatch.setenv(KEY, "one, two")
    config = READER.parse({"gateway": {"api_keys_env": KEY}, "services": {"echo": {"kind": "echo"}}})
    gateway = await LocalCluster(config, loaded(LISTED)).gateway()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://test") as http:
        for key, status in ((None, 401), ("three", 401), ("two", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            answer = await http.post("/models/echo", json={"inputs": "hello"}, headers=headers)
            assert answer.status_code == status
    statuses = counters["pliant_tenant_requests_total"].inc.mock_calls
    assert statuses == [call(tags={"tenant": "default", "status": "200"})], "strangers are nobody's"


async def test_its_work_is_done_for_whoever_asked(
    monkeypatch: pytest.MonkeyPatch, counters: dict[str, MagicMock]
) -> None:
    """A kind does nothing for it: its errands know their tenants, and its services are found for those who may."""
    monkeypatch.setenv(KEY, f"a:{hashed('a')}, b:{hashed('b')}")
    tenants = {"a": {"rights": ["infer", "observe"], "requests_per_minute": 100}, "b": {"services": []}}
    services = {"echo": {"kind": "echo", "replicas": 2}}
    config = READER.parse({"gateway": {"keys_env": KEY}, "services": services, "tenants": tenants})
    cluster = LocalCluster(config, loaded(LISTED))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(await cluster.gateway()), base_url="http://test"
    ) as http:
        answers = {}
        for key in "ab":
            headers = {"Authorization": f"Bearer {key}"}
            answers[key] = await http.post("/models/echo", json={"inputs": "hello"}, headers=headers)
        stats = (await http.get("/stats", headers={"Authorization": "Bearer a"})).json()
    assert {key: answer.status_code for key, answer in answers.items()} == {"a": 200, "b": 403}
    assert answers["a"].headers["x-ratelimit-remaining-requests"] == "99"
    assert {name: facts["requests"] for name, facts in stats["tenants"].items()} == {"a": {"200": 1}, "b": {"403": 1}}
