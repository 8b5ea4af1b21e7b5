"""Calls through Ray Serve go where the gateway says, and whatever goes wrong there is told in three words."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError

from pliant.deployments.serving import table
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.least_held import LeastHeld, Share
from pliant.deployments.serving.parcels import Parcel, Report
from pliant.deployments.serving.router import ReplicaRouter, mapped_errors


class Pending:
    def __init__(self, replica: str) -> None:
        self.args: tuple[Parcel[str]] = (Parcel(replica, "g", ()),)


def router(service: str) -> Any:
    made: Any = ReplicaRouter.__new__(ReplicaRouter)
    made.initialize_state(service)
    return made


def test_parcels_go_to_the_replica_that_they_name() -> None:
    made = router("obeyed")
    made._running = {"a": "the replica"}
    assert made._obey(Pending("a"), False) == "the replica"
    with pytest.raises(ReplicaLeftError, match="has left"):
        made._obey(Pending("b"), False)
    with pytest.raises(ReplicaLeftError, match="cannot be reached"):
        made._obey(Pending("a"), True)


def test_the_table_hears_of_what_serve_tells_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.serve.request_router.RequestRouter.update_replicas", lambda *_: None)
    monkeypatch.setattr("ray.serve.request_router.RequestRouter.on_replica_actor_died", lambda *_: None)
    made, known = router("told"), table.ReplicaTable[Share, Report](LeastHeld())
    first, later = Report(version=0, held={}, served=0), Report(version=0, held={"x": 3}, served=9)
    running = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats, replica_metadata=metadata)
        for name, stats, metadata in (("a", {}, first), ("b", later, first), ("c", {}, {}))
    ]
    made.update_replicas(running)
    table.feed("told").follow(known)
    assert known.reports() == {"a": first, "b": later}
    made.on_replica_actor_died(running[0].replica_id)
    made.update_replicas(running)
    assert known.reports() == {"b": later}, "the controller lists the dead for a while"


def test_router_and_gateway_meet_though_the_class_is_pickled() -> None:
    options: dict[str, Any] = {"request_router_class": "pliant.deployments.serving.router:ReplicaRouter"}
    config = RequestRouterConfig(**options, request_router_kwargs={"service": "s"})
    config._serialize_request_router_cls()
    router: Any = config.get_request_router_class()
    assert router.initialize_state.__globals__["feed"] is table.feed


@pytest.mark.parametrize(
    ("raised", "told_as"),
    [
        (ActorDiedError(), ReplicaLostError),
        (TaskCancelledError(), ReplicaLostError),
        (RuntimeError("it was killed between the call and its first word"), ReplicaLostError),
        (RayTaskError("generate", "traceback", ValueError("a bug")), ReplicaLostError),  # type: ignore[no-untyped-call]
        (ReplicaLeftError("replica a has left"), ReplicaLeftError),
        (DeploymentUnavailableError(DeploymentID("chat")), NotDeployedError),
        (asyncio.CancelledError(), ReplicaLostError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_a_call_raises_is_one_of_three(raised: BaseException, told_as: type[Exception]) -> None:
    with pytest.raises(told_as), mapped_errors():
        raise raised


async def test_a_client_that_leaves_is_no_loss() -> None:
    async def call() -> None:
        with mapped_errors():
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stream_that_is_closed_is_no_loss() -> None:
    async def pieces() -> Any:
        with mapped_errors():
            yield 1
            yield 2

    stream = pieces()
    await anext(stream)
    await stream.aclose()
