"""The Ray Serve router of all services: it obeys. Which replica gets a call, the gateway chooses itself.

The gateway knows better than Serve when an answer has ended and how much work it was, and chooses another replica after
a failure. So a call goes to the replica that its first argument names, and the one step that binds a request to a
replica is overridden; `tests/deployments/serving/test_ray_contract.py` pins the hooks. What the router hears of
replicas, their reports above all, goes to the table that follows its service's `feed`: Serve pickles a router class by
value, so that router and gateway meet in a module.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, cast

from grpc.aio import AioRpcError
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.context import _set_request_context
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.lines import lines
from pliant.deployments.serving.listening import address
from pliant.deployments.serving.parcels import Parcel
from pliant.deployments.serving.table import Chooser, ReplicaTable, feed


class ReplicaRouter(RequestRouter):
    """Routes a call to the replica that its first argument names in `replica`.

    Raises ReplicaLeftError when that replica has left, or did not take the call.
    """

    def initialize_state(self, service: str) -> None:  # type: ignore[override]
        self._feed = feed(service)
        self._lines = lines(service)
        self._running: dict[str, RunningReplica] = {}
        self._feed.probe_with(self._probe)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._running = {replica.replica_id.unique_id: replica for replica in replicas}
        said = {name: replica.replica_metadata for name, replica in self._running.items()}
        self._lines.sync({name: where for name, metadata in said.items() if (where := address(metadata))})
        self._feed.sync({name: each.routing_stats or said[name] or None for name, each in self._running.items()})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._feed.lose(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._feed.suspect(replica_id.unique_id)

    async def _probe(self, replica: str) -> None:
        """Serve's own question, which the process answers beside what it computes."""
        await self._running[replica].get_queue_len(deadline_s=math.inf)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        return self._obey(pending_request, is_retry)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas] if pending_request is None else [[self._obey(pending_request, False)]]

    def _obey(self, pending_request: PendingRequest, is_retry: bool) -> RunningReplica:
        replica: str = pending_request.args[0].replica
        if is_retry or replica not in self._running:
            raise ReplicaLeftError(f"replica {replica} {'cannot be reached' if is_retry else 'has left'}")
        return self._running[replica]


class ReplicaCalls:
    """See `courier.Calls`: to the replicas of `service`, over the line to each, and where there is none by `handle`,
    whose router is to obey."""

    def __init__(self, service: str, handle: DeploymentHandle[Any]) -> None:
        self._lines = lines(service)
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def one(self, parcel: Parcel[Any]) -> Any:
        """The reply to the only query of `parcel`."""
        return await self.call("answer", parcel)

    def several(self, parcel: Parcel[Any]) -> AsyncGenerator[Sequence[tuple[int, Any]], None]:
        """Replies as they are made, each with the index of its query."""
        return self.stream("answers", parcel)

    async def call(self, method: str, parcel: Parcel[Any]) -> Any:
        """What `method` returns. To cancel it ends the call in the replica."""
        if line := self._lines.to(parcel.replica):
            return await line.call(method, parcel)
        with mapped_errors():
            _set_request_context(request_id=parcel.request(0))  # for Serve's own log lines
            response = getattr(self._handle, method).remote(parcel)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise

    async def stream(self, method: str, parcel: Parcel[Any]) -> AsyncGenerator[Any, None]:
        """What `method` yields. To close it ends the call in the replica."""
        if line := self._lines.to(parcel.replica):
            async with aclosing(line.stream(method, parcel)) as items:
                async for item in items:
                    yield item
            return
        with mapped_errors():
            _set_request_context(request_id=parcel.request(0))
            response = cast(DeploymentResponseGenerator[Any], getattr(self._streaming, method).remote(parcel))
            try:
                async for item in response:
                    yield item
            finally:
                response.cancel()  # type: ignore[no-untyped-call]


def table_of(service: str, chooser: Chooser[Any, Any], handle: DeploymentHandle[Any] | None) -> ReplicaTable[Any, Any]:
    """The replicas of `service`, which the router of `handle` keeps true; it stays empty without one.

    The router runs in this loop, not in a thread of its own, from now on: the table needs no lock, and a call no
    hand-over.
    """
    table: ReplicaTable[Any, Any] = ReplicaTable(chooser)
    if handle:
        handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
        feed(service).follow(table)
    return table


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Raises NotDeployedError when there is no replica at all to call, and ReplicaLostError when the one that is called
    within dies, or raises anything itself.

    A client that leaves is still a cancellation.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        raise ReplicaLostError("it died") from error  # not the client left, but the replica
    except DeploymentUnavailableError as error:
        raise NotDeployedError from error
    except (ReplicaLeftError, GeneratorExit):
        raise
    except (RayActorError, TaskCancelledError, AioRpcError) as error:
        raise ReplicaLostError("it died") from error
    except Exception as error:
        raise ReplicaLostError(f"{type(error).__name__}: {error}") from error
