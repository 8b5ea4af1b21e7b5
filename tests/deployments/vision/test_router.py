"""Which replica gets an image, and the parts of Ray Serve that this builds on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pliant.deployments.vision.router import LeastBusyRouter
from pliant.deployments.vision.routing_table import VisionRoutingTable
from ray.serve.config import RequestRouterConfig

from pliant.deployments.serving.errors import ReplicaLeftError
from pliant.deployments.serving.router import TicketRouter
from pliant.deployments.vision import routing_table
from pliant.deployments.vision.messages import Answer, Query, Ticket
from pliant.deployments.vision.replica import VisionReplica
from pliant.formats.vision_task import TaskRef
from pliant.policies.cluster.live_tokens import NoReplicaError

QUERY = Query(b"", TaskRef("a", "/a", "1", 2, ()), 1.0, 1.0)


def table(**outstanding: dict[str, int]) -> VisionRoutingTable:
    made = VisionRoutingTable()
    reports: Any = {replica: {"outstanding": held} for replica, held in outstanding.items()}
    made.sync(reports)
    return made


def test_the_least_busy_replica_is_next() -> None:
    made = table(a={"other": 3}, b={"other": 1}, c={})
    assert Counter(made.choose() for _ in range(5)) == {"b": 2, "c": 3}
    made.done("c")
    assert made.choose() == "c"


def test_what_this_gateway_sent_is_counted_once() -> None:
    made = VisionRoutingTable()
    reports: Any = {"a": {"outstanding": {made.gateway: 7}}, "b": {"outstanding": {"other": 1}}}
    made.sync(reports)
    assert made.choose() == "a"


def test_replicas_come_and_go() -> None:
    made = table(a={}, b={})
    made.suspect("a")
    assert {made.choose(), made.choose()} == {"b"}
    made.trust("a")
    assert made.choose() == "a"
    made.lose("a")
    made.sync({"a": None, "b": None})
    assert {made.choose() for _ in range(9)} == {"b"}
    assert made.ready
    made.sync({})
    assert not made.ready
    with pytest.raises(NoReplicaError):
        made.choose()
    made.done("b")


def test_those_to_be_avoided_are() -> None:
    made = table(a={}, b={})
    assert made.choose({"a"}) == "b"
    with pytest.raises(NoReplicaError):
        made.choose({"a", "b"})


class Pending:
    def __init__(self, ticket: Ticket) -> None:
        self.args = (ticket,)


def test_tickets_are_obeyed() -> None:
    router: Any = LeastBusyRouter.__new__(LeastBusyRouter)
    router._running = {"a": "the replica"}
    assert router._obey(Pending(Ticket("a", "g", QUERY)), False) == "the replica"
    with pytest.raises(ReplicaLeftError, match="has left"):
        router._obey(Pending(Ticket("b", "g", QUERY)), False)
    with pytest.raises(ReplicaLeftError, match="cannot be reached"):
        router._obey(Pending(Ticket("a", "g", QUERY)), True)


def test_both_sides_share_one_table() -> None:
    options: dict[str, Any] = {"request_router_class": "pliant.deployments.vision.router:LeastBusyRouter"}
    config = RequestRouterConfig(**options, request_router_kwargs={"service": "s"})
    config._serialize_request_router_cls()
    router = config.get_request_router_class()
    assert router.initialize_state.__globals__["shared"] is routing_table.shared
    assert issubclass(router, TicketRouter)


class Engine:
    failure: Exception | None = None
    seconds = 0.0

    async def classify(self, query: Query) -> Answer:
        return Answer(b"", 0, "in_time", 1)

    def computing_s(self) -> float:
        return self.seconds


class Following:
    ended = False

    def done(self) -> bool:
        return self.ended


async def test_a_replica_counts_by_gateway_and_knows_its_health() -> None:
    made: Any = VisionReplica.__new__(VisionReplica)
    made._engine, made._outstanding, made._following = Engine(), Counter(), Following()
    assert isinstance(await made.classify(Ticket("a", "g", QUERY)), Answer)
    assert made._outstanding == {}
    await made.check_health()
    made._engine.seconds = 61
    with pytest.raises(RuntimeError, match="one batch has taken 61 s"):
        await made.check_health()
    made._engine.failure = OSError("no memory")
    with pytest.raises(OSError, match="no memory"):
        await made.check_health()
    made._engine = Engine()
    made._following.ended = True
    with pytest.raises(RuntimeError, match="not followed any more"):
        await made.check_health()
