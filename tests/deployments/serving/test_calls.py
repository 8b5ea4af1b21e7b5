"""Calls to the planner end as whoever waits for them, or the planner, does."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from pliant.deployments.serving.calls import answer
from pliant.deployments.serving.errors import ReplicaLostError


class Response:
    """As Serve's: it comes to what is set."""

    def __init__(self) -> None:
        self.found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, str]:
        return self.found.__await__()

    def cancel(self) -> None:
        self.cancelled = True


async def test_a_planner_that_dies_is_lost() -> None:
    dies, stops = Response(), Response()
    dies.found.set_exception(ActorDiedError())
    stops.found.cancel()
    for response in (dies, stops):
        with pytest.raises(ReplicaLostError):
            await answer(response)


async def test_who_leaves_leaves_nothing_behind() -> None:
    response = Response()
    waits = asyncio.create_task(answer(response))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert response.cancelled
