"""Arlo's dispatcher as a Ray Serve request router: length and budget decide which replica gets a request.

The base class queues requests, probes replicas for their queue lengths, and matches the two up; none of that is needed
when the process itself counts what it has sent. So the one step that binds a request to a replica is overridden, as in
Serve's own `capacity_queue_router`; `tests/deployments/serving/test_ray_contract.py` pins the hooks.
"""

from __future__ import annotations

import asyncio

from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from pliant.deployments.encoder.engine import Assignment
from pliant.deployments.encoder.routing_table import shared
from pliant.deployments.serving.router import WatchingRouter

_RETRY_S = 0.01


class LengthRouter(WatchingRouter):
    """Routes a call by its first argument: a `Query` by policy, an `Assignment` to the replica that it names.

    `await handle.infer.remote(query)` raises NoRuntimeError or DeadlineError when the policy refuses the request, and
    `await handle.hold.remote(assignment)` raises LookupError when the replica has left; neither waits for a replica.
    """

    def initialize_state(self, service: str, slo_s: float) -> None:  # type: ignore[override]
        self._table = shared(service, slo_s)
        self.watch(self._table)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if is_retry:
            await asyncio.sleep(_RETRY_S)
        return self._choose(pending_request)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas] if pending_request is None else [[self._choose(pending_request)]]

    def _choose(self, pending_request: PendingRequest) -> RunningReplica:
        message = pending_request.args[0]
        if isinstance(message, Assignment):
            if message.replica not in self._running:
                raise LookupError(f"replica {message.replica} has left")
            return self._running[message.replica]
        return self._running[self._table.choose(message.length, message.budget_s, message.utility)]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._table.done(replica_id.unique_id)
