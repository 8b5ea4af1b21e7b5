"""An image that waits in a replica, or is computed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.vision.messages import Answer


@dataclass(eq=False, slots=True)
class Waiting:
    """A query that waits or is computed; times are the loop's."""

    image: bytes
    task: str
    """Its key."""
    arrival: float
    deadline: float
    utility: float
    reply: asyncio.Future[Answer | Refusal] = field(repr=False)

    def settle(self, reply: Answer | Refusal) -> bool:
        """Whether anybody still waited for the reply, which is given once."""
        if self.reply.done():
            return False
        self.reply.set_result(reply)
        return True
