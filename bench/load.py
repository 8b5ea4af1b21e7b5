"""Closed-loop HTTP clients: each sends its next request when the last is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np


@dataclass(frozen=True)
class Block:
    """What one system did with a list of requests, in the order of the list."""

    latencies: np.ndarray
    """Seconds, as the client saw them."""
    answers: list[Any]
    """The parsed JSON bodies."""
    seconds: float
    """From the first request to the last answer."""

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return len(self.answers) / self.seconds


class LoadError(Exception):
    """A request was not answered with 200, so that what was measured means nothing."""


def session() -> aiohttp.ClientSession:
    """Keeps its connections alive, as many as there are clients."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))


async def closed_loop(http: aiohttp.ClientSession, url: str, bodies: Sequence[bytes], clients: int) -> Block:
    """POST each of `bodies`, JSON, to `url`, from `clients` at once. Raises LoadError unless all answers are 200."""
    latencies = np.zeros(len(bodies))
    answers: list[Any] = [None] * len(bodies)
    pending = iter(range(len(bodies)))

    async def client() -> None:
        for index in pending:
            started = time.perf_counter()
            async with http.post(url, data=bodies[index], headers={"Content-Type": "application/json"}) as response:
                answer = await response.json()
            latencies[index] = time.perf_counter() - started
            if response.status != 200:
                raise LoadError(f"{url} answered {response.status}: {answer}")
            answers[index] = answer

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
    except* LoadError as failed:
        raise failed.exceptions[0] from None
    return Block(latencies, answers, time.perf_counter() - started)
