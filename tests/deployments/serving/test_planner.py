"""The planner by itself: what it passes on between gateways."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from support.echo.kind import ECHO, EchoKind

from pliant.config.cluster import Reader
from pliant.deployments.kinds import KINDS, loaded
from pliant.deployments.serving.joint_budget import JointBudget
from pliant.deployments.serving.messages import News
from pliant.deployments.serving.planner import Planner

pytestmark = pytest.mark.virtual_time


def planner_of(*services: str) -> Planner:
    listed = (*KINDS, ECHO)
    config = Reader(kind for kind, _ in listed).parse({"services": {name: {"kind": "echo"} for name in services}})
    handles = {name: SimpleNamespace(_init=lambda **_: None) for name in services}
    return Planner(config, loaded(listed), handles)  # type: ignore[arg-type]


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
    planner = Planner(config, loaded(KINDS), {"chat": SimpleNamespace(_init=lambda **_: None)})  # type: ignore[dict-item]
    _, guidance = await planner.exchange("a", "", {"chat": News(arrived=Counter({7: 2}))})
    assert heard == [("chat", 2)]
    assert guidance["chat"].plan == {"wanted_replicas": 3, "wanted_because": "chat"}
    assert await planner.record_autoscaling_stats() == {"chat": 3}
    planner.check_health()


async def test_gateways_that_are_busy_get_more_and_hear_of_it() -> None:
    listed = (*KINDS, ECHO)
    args = {"gateway": {"replicas": {"min": 1, "max": 3}}, "services": {"echo": {"kind": "echo"}}}
    config = Reader(kind for kind, _ in listed).parse(args)
    planner = Planner(config, loaded(listed), {"echo": SimpleNamespace(_init=lambda **_: None)})  # type: ignore[dict-item]
    assert await planner.record_autoscaling_stats() == {}
    for _ in range(90):
        _, guidance = await planner.exchange("a", "", {"echo": News(gateway_busy=0.9)})
        await asyncio.sleep(1.0)
    assert await planner.record_autoscaling_stats() == {"gateway": 2}
    assert guidance["gateway"].plan["wanted"] == 2
    assert guidance["gateway"].plan["busy"] == pytest.approx(0.45), "of what two would have"
    assert guidance["gateway"].gateways == {"a"}
