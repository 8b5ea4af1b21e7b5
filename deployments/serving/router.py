"""What the services' Ray Serve routers have in common: follow the replicas, obey tickets, and tell how calls end.

Serve pickles a service's router class by value, its bases here by reference. A gateway chooses a replica itself, from
the table that it shares with the router, where it knows better than Serve when an answer has ended and how large it
was, and so that it may choose another replica after a failure. So routing is obeying, and the one step that binds a
request to a replica is overridden; `tests/deployments/serving/test_ray_contract.py` pins the hooks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from grpc.aio import AioRpcError
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError

_SUSPECT_S = 1.0

M = TypeVar("M")


class Table(Protocol):
    """What a process knows of a service's replicas; `sync` takes the reports of those that are running."""

    def sync(self, reports: Mapping[str, Any]) -> None: ...

    def lose(self, replica: str) -> None: ...

    def suspect(self, replica: str) -> None: ...

    def trust(self, replica: str) -> None: ...


class WatchingRouter(RequestRouter):
    """Keeps a table true: which replicas run, what each last reported, and which have died or cannot be reached."""

    def watch(self, table: Table) -> None:
        """Do so for `table`, from `initialize_state` on."""
        self._watched = table
        self._running: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._running = {replica.replica_id.unique_id: replica for replica in replicas}
        self._watched.sync({name: _report(replica) for name, replica in self._running.items()})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._watched.lose(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._watched.suspect(replica_id.unique_id)
        asyncio.get_running_loop().call_later(_SUSPECT_S, self._watched.trust, replica_id.unique_id)


class TicketRouter(WatchingRouter):
    """Routes a call to the replica that its first argument names in `replica`.

    Raises ReplicaLeftError when that replica has left, or did not take the call: the gateway then chooses anew.
    """

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


def obey(handle: DeploymentHandle[Any]) -> None:
    """Have the router of `handle` run in this loop, not in a thread of its own, from now on: the table needs no lock,
    and a call no hand-over."""
    handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]


@contextmanager
def told() -> Iterator[None]:
    """Raises ReplicaLostError when the replica that is called within dies, NotDeployedError when there is none at all.

    A client that leaves is still a cancellation.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        raise ReplicaLostError from error  # not the client left, but the replica
    except DeploymentUnavailableError as error:
        raise NotDeployedError from error
    except (RayActorError, TaskCancelledError, AioRpcError) as error:
        raise ReplicaLostError from error


def caller(method: Callable[[M], Any]) -> Callable[[M], Awaitable[Any]]:
    """Calls of a handle's `method` that raise as `told` says, and that leave the replica when they are cancelled."""

    async def call(message: M) -> Any:
        response = method(message)
        with told():
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise

    return call


def _report(replica: RunningReplica) -> Any:
    """The replica's latest statistics, or what it said when it started; None if it has said nothing."""
    return replica.routing_stats or replica.replica_metadata or None
