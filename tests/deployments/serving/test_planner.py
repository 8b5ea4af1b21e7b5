"""The planner by itself: what it passes on between gateways."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace

import pytest
from support.echo.kind import ECHO, EchoConfig, EchoKind
from support.rooms import roomy

from pliant.config.base import ReplicaRange
from pliant.config.cluster import Reader
from pliant.deployments.kinds import KINDS, loaded
from pliant.deployments.serving.joint_budget import JointBudget
from pliant.deployments.serving.messages import News, Step
from pliant.deployments.serving.places import Room, Rooms
from pliant.deployments.serving.planner import Planner
from pliant.deployments.serving.table import ReplicaTable

pytestmark = pytest.mark.virtual_time


def planner_of(*services: str, look: Callable[[], Awaitable[Rooms]] = roomy) -> Planner:
    listed = (*KINDS, ECHO)
    config = Reader(kind for kind, _ in listed).parse({"services": {name: {"kind": "echo"} for name in services}})
    handles = {name: SimpleNamespace(_init=lambda **_: None) for name in services}
    return Planner(config, loaded(listed), handles, look)  # type: ignore[arg-type]


async def test_services_of_one_kind_share_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(EchoKind, "part", lambda self, planning: made.append(sorted(planning.handles)))
    planner_of("one", "two")
    assert made == [["one", "two"]]


async def test_gateways_hear_of_each_other_until_one_stops_asking() -> None:
    planner = planner_of("echo")

    async def heard(gateway: str) -> set[str]:
        _, guidance = await planner.exchange(gateway, "", {})
        return set(guidance["echo"].gateways)

    assert await heard("a") == {"a"}
    assert await heard("b") == {"a", "b"}
    for _ in range(10):
        await asyncio.sleep(1.0)
        left = await heard("b")
    assert left == {"b"}


async def test_gateways_hear_how_each_other_s_requests_ended() -> None:
    planner = planner_of("echo")

    async def heard(gateway: str, **requests: int) -> dict[str, Mapping[str, int]]:
        _, guidance = await planner.exchange(gateway, "", {"echo": News(requests=requests)})
        return dict(guidance["echo"].requests)

    await heard("a", ok=3)
    assert await heard("b", shed=1) == {"a": {"ok": 3}, "b": {"shed": 1}}
    assert await heard("a", ok=4) == {"a": {"ok": 4}, "b": {"shed": 1}}
    for _ in range(10):
        await asyncio.sleep(1.0)
        left = await heard("b", shed=1)
    assert left == {"b": {"shed": 1}}


async def test_with_a_budget_it_hears_demand_and_says_how_many_replicas_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = []
    monkeypatch.setattr(JointBudget, "hear", lambda self, service, news: heard.append((service, news.arrived.total())))
    monkeypatch.setattr(JointBudget, "wanted", lambda self: {"chat": 3})
    monkeypatch.setattr(JointBudget, "facts", lambda self, service: {"wanted_replicas": 3, "wanted_because": service})
    chat = {"kind": "llm", "model": "m", "replicas": {"min": 1, "max": 4}}
    config = Reader([kind for kind, _ in KINDS]).parse({"budget": {}, "services": {"chat": chat}})
    planner = Planner(config, loaded(KINDS), {"chat": SimpleNamespace(_init=lambda **_: None)}, roomy)  # type: ignore[dict-item]
    _, guidance = await planner.exchange("a", "", {"chat": News(arrived=Counter({7: 2}))})
    assert heard == [("chat", 2)]
    assert guidance["chat"].plan == {"wanted_replicas": 3, "wanted_because": "chat"}
    assert await planner.record_autoscaling_stats() == {"chat": 3}
    planner.check_health()


async def test_gateways_that_are_busy_get_more_and_hear_of_it() -> None:
    listed = (*KINDS, ECHO)
    args = {"gateway": {"replicas": {"min": 1, "max": 3}}, "services": {"echo": {"kind": "echo"}}}
    config = Reader(kind for kind, _ in listed).parse(args)
    handles = {"echo": SimpleNamespace(_init=lambda **_: None)}
    planner = Planner(config, loaded(listed), handles, roomy)  # type: ignore[arg-type]
    assert await planner.record_autoscaling_stats() == {}
    for _ in range(90):
        _, guidance = await planner.exchange("a", "", {"echo": News(gateway_busy=0.9)})
        await asyncio.sleep(1.0)
    assert await planner.record_autoscaling_stats() == {"gateway": 2}
    assert guidance["gateway"].plan["wanted"] == 2
    assert guidance["gateway"].plan["busy"] == pytest.approx(0.45), "of what two would have"
    assert guidance["gateway"].gateways == {"a"}


async def test_gateways_hear_why_no_replica_begins_until_one_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoConfig, "resources", lambda self: {"num_cpus": 2.0, "num_gpus": 1.0})
    rooms: list[Rooms] = [([Room(0, 4), Room(1, 1.5)], Room(1, 5.5))]

    async def look() -> Rooms:
        return rooms[0]

    planner = planner_of("nowhere", look=look)

    async def said() -> list[str]:
        await asyncio.sleep(6)
        _, guidance = await planner.exchange("a", "", {})
        return [step.text for step in guidance["nowhere"].starting.values()]

    [why] = await said()
    assert why.startswith("no node has the 1 GPU and 2 CPUs that a replica reserves, the largest has 1 GPU and 1.5 CPU")
    rooms[0] = [Room(1, 4)], Room(0, 4)
    assert await said() == [], "one may just have got its place"
    await asyncio.sleep(30)
    assert await said() == ["a replica reserves 1 GPU and 2 CPUs, and all nodes together have 4 CPUs left"]
    await planner.starting("nowhere", "a", Step("loading", 0.5))
    assert await said() == ["loading"]


async def test_gateways_hear_why_a_service_has_fewer_replicas_than_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {"a": object()}
    monkeypatch.setattr(ReplicaTable, "reports", lambda self: reports)
    monkeypatch.setattr(EchoConfig, "replica_range", lambda self: ReplicaRange(min=2, max=2))
    monkeypatch.setattr(EchoConfig, "resources", lambda self: {"num_cpus": 2.0})

    async def look() -> Rooms:
        return [Room(0, 3)], Room(0, 1)

    planner = planner_of("echo", look=look)

    async def said() -> list[str]:
        await asyncio.sleep(40)
        _, guidance = await planner.exchange("a", "", {})
        return [step.text for step in guidance["echo"].starting.values()]

    assert await said() == ["a replica reserves 2 CPUs, and all nodes together have 1 CPU left"]
    reports["b"] = object()
    assert await said() == []
    monkeypatch.setattr(planner, "_budget", SimpleNamespace(wanted=lambda: {"echo": 3}, facts=lambda _name: {}))
    await planner.record_autoscaling_stats()
    assert await said() == ["a replica reserves 2 CPUs, and all nodes together have 1 CPU left"]


async def test_one_that_nobody_obeys_is_replaced() -> None:
    older, newer = planner_of("echo"), planner_of("echo")
    of_older, _ = await older.exchange("a", "", {})
    seen, _ = await newer.exchange("a", of_older, {})
    newer.check_health()
    older.check_health()
    await older.exchange("a", seen, {})
    with pytest.raises(RuntimeError, match="later clock"):
        older.check_health()
