"""Ray Serve's side of balancing by live tokens: the router keeps the table true and sends where the table says.

The gateway chooses the replica itself, from the table that it shares with the router, because it knows when an answer
has ended and how large it was; Serve tells a router neither. So routing is obeying, and as in the encoder's router the
one step that binds a request to a replica is overridden; `tests/deployments/test_ray_contract.py` pins the hooks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

from grpc.aio import AioRpcError
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pliant.deployments.gateway.errors import NotDeployedError, ReplicaLostError
from pliant.deployments.llm.messages import Refusal, ReplicaLeftError, ReplicaReport, Ticket
from pliant.deployments.llm.request import Piece
from pliant.deployments.llm.routing_table import shared

_SUSPECT_S = 1.0


class LiveTokenRouter(RequestRouter):
    """Routes a call to the replica that its first argument, a `Ticket`, names.

    Raises ReplicaLeftError when that replica has left, or did not take the call: the gateway then chooses anew.
    """

    def initialize_state(self, service: str) -> None:  # type: ignore[override]
        self._table = shared(service)
        self._running: dict[str, RunningReplica] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._running = {replica.replica_id.unique_id: replica for replica in replicas}
        self._table.sync({name: _report(replica) for name, replica in self._running.items()})

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        return self._obey(pending_request, is_retry)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas] if pending_request is None else [[self._obey(pending_request, False)]]

    def _obey(self, pending_request: PendingRequest, is_retry: bool) -> RunningReplica:
        ticket: Ticket = pending_request.args[0]
        if is_retry or ticket.replica not in self._running:
            raise ReplicaLeftError(f"replica {ticket.replica} {'cannot be reached' if is_retry else 'has left'}")
        return self._running[ticket.replica]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.lose(replica_id.unique_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_unavailable(replica_id)
        self._table.suspect(replica_id.unique_id)
        asyncio.get_running_loop().call_later(_SUSPECT_S, self._table.trust, replica_id.unique_id)


def _report(replica: RunningReplica) -> ReplicaReport | None:
    """The replica's latest statistics, or what it said when it started."""
    return cast(ReplicaReport | None, replica.routing_stats or replica.replica_metadata or None)


def caller(handle: DeploymentHandle[Any]) -> Callable[[Ticket], AsyncGenerator[Piece | Refusal, None]]:
    """How a gateway sends tickets to replicas of `handle`'s deployment, whose router this is.

    The call ends the generation in the replica when it is closed or cancelled. It raises ReplicaLostError when the
    replica dies, ReplicaLeftError when it left before, and NotDeployedError when there is none at all.
    """
    # The router runs in this loop, not in a thread of its own, so that the table needs no lock and a call no hand-over.
    handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
    generate = handle.options(stream=True).generate

    async def call(ticket: Ticket) -> AsyncGenerator[Piece | Refusal, None]:
        response = generate.remote(ticket)
        try:
            async for item in cast(AsyncIterator[Piece | Refusal], response):
                yield item
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            raise ReplicaLostError from error  # not the client left, but the replica
        except DeploymentUnavailableError as error:
            raise NotDeployedError from error
        except (RayActorError, TaskCancelledError, AioRpcError) as error:
            raise ReplicaLostError from error
        finally:
            response.cancel()  # type: ignore[no-untyped-call]

    return call
