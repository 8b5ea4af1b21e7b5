"""Whether replicas that let requests wait still run: asked by a cheap call of its own, so that no client waits for one
that stopped.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Probe = Callable[[str], Awaitable[Any]]
"""Ends once the process of that replica answers, whatever it computes; raises if it cannot be reached."""

_ANSWERS_WITHIN_S = 2.0
"""Or the replica is chosen no more until it does."""
_MAY_BE_LOST_AFTER_S = 10.0
"""On its way there or back; another call is made then."""
_PAUSE_S = 1.0
"""Between two calls to one replica."""


class Doubted(Protocol):
    """What has the replicas."""

    def suspect(self, replica: str) -> None:
        """Choose it no more until `trust`."""

    def suspected(self, replica: str) -> bool:
        """Whether it is not chosen because of that."""

    def trust(self, replica: str) -> None:
        """It answers."""


class Probes:
    """Calls the replicas of one service that are doubted, one call at a time each, until they answer or are dropped."""

    def __init__(self, probe: Probe, replicas: Doubted) -> None:
        self._probe = probe
        self._replicas = replicas
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def doubt(self, replica: str) -> None:
        """Call `replica`, unless that is being done or was done just now."""
        if replica not in self._under_way:
            task = self._under_way[replica] = asyncio.create_task(self._call(replica))
            task.add_done_callback(lambda _: self._under_way.pop(replica))

    def drop(self, replica: str) -> None:
        """`replica` is gone."""
        if task := self._under_way.get(replica):
            task.cancel()

    async def _call(self, replica: str) -> None:
        suspected = True
        while suspected:
            if await self._answers(replica):
                self._replicas.trust(replica)
            else:
                self._replicas.suspect(replica)
            await asyncio.sleep(_PAUSE_S)
            suspected = self._replicas.suspected(replica)

    async def _answers(self, replica: str) -> bool:
        """Whether one call was answered, perhaps late: then `replica` is suspected meanwhile."""
        call = asyncio.ensure_future(self._probe(replica))
        try:
            if not (await asyncio.wait((call,), timeout=_ANSWERS_WITHIN_S))[0]:
                self._replicas.suspect(replica)
                await asyncio.wait((call,), timeout=_MAY_BE_LOST_AFTER_S)
            return call.done() and not call.cancelled() and call.exception() is None
        finally:
            call.cancel()
