"""Ray Serve's side of balancing by live tokens. See `pliant.deployments.serving.router`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

from ray.serve.handle import DeploymentHandle

from pliant.deployments.llm.messages import Refusal, Ticket
from pliant.deployments.llm.request import Piece
from pliant.deployments.llm.routing_table import shared
from pliant.deployments.serving.router import TicketRouter, told


class LiveTokenRouter(TicketRouter):
    """Routes a `Ticket`."""

    def initialize_state(self, service: str) -> None:  # type: ignore[override]
        self.watch(shared(service))


def caller(handle: DeploymentHandle[Any]) -> Callable[[Ticket], AsyncGenerator[Piece | Refusal, None]]:
    """How a gateway sends tickets to replicas of `handle`'s deployment, whose router this is (see `router.obey`).

    The call ends the generation in the replica when it is closed or cancelled. It raises ReplicaLostError when the
    replica dies, ReplicaLeftError when it left before, and NotDeployedError when there is none at all.
    """
    generate = handle.options(stream=True).generate

    async def call(ticket: Ticket) -> AsyncGenerator[Piece | Refusal, None]:
        response = generate.remote(ticket)
        try:
            with told():
                async for item in cast(AsyncIterator[Piece | Refusal], response):
                    yield item
        finally:
            response.cancel()  # type: ignore[no-untyped-call]

    return call
