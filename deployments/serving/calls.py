"""Calls to the planner, that end when whoever waits for them leaves."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayActorError

from pliant.deployments.serving.errors import ReplicaLostError


async def answer(response: Any) -> Any:
    """What a Serve handle's `response` comes to. Raises ReplicaLostError when the planner dies before it answers."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        raise ReplicaLostError from None  # not whoever waits left, but the planner
    except RayActorError as error:
        raise ReplicaLostError("it died") from error
