"""Ray Serve's side of sending images to the least busy replica. See `pliant.deployments.serving.router`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from pliant.deployments.serving import router
from pliant.deployments.vision.messages import Answer, Refusal, Ticket
from pliant.deployments.vision.routing_table import shared


class LeastBusyRouter(router.TicketRouter):
    """Routes a `Ticket`."""

    def initialize_state(self, service: str) -> None:  # type: ignore[override]
        self.watch(shared(service))


def caller(handle: DeploymentHandle[Any]) -> Callable[[Ticket], Awaitable[Answer | Refusal]]:
    """How a gateway sends tickets to replicas of `handle`'s deployment, whose router this is (see `router.obey`).

    A call that is cancelled leaves the replica's queue. It raises ReplicaLostError when the replica dies,
    ReplicaLeftError when it left before, and NotDeployedError when there is none at all.
    """
    return router.caller(handle.classify.remote)
