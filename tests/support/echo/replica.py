"""A toy replica: it says what it hears, unless the text tells it to do something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from support.echo.config import EchoConfig

from pliant.deployments.serving import logs
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Parcel, Refusal, Report
from pliant.deployments.serving.replica import Desk

REFUSE, RAISE, SLOW = "refuse", "raise", "slow"
"""The first word of a text that is not answered, breaks the replica down, or takes for ever."""


class EchoReplica:
    def __init__(self, service: str, config: EchoConfig) -> None:
        logs.start()
        self._desk = Desk(service, self.echo)
        self._served = 0

    async def answer(self, parcel: Parcel[str]) -> str | Refusal:
        """See `Desk.one`."""
        return await self._desk.one(parcel)

    async def answers(self, parcel: Parcel[str]) -> AsyncGenerator[list[tuple[int, str | Refusal]], None]:
        """See `Desk.several`."""
        async for part in self._desk.several(parcel):
            yield part

    def check_health(self) -> None:
        """Serve replaces a replica that breaks down again and again."""
        self._desk.check()

    def record_replica_metadata(self) -> dict[str, Any]:
        """What gateways know of a new replica before its first statistics."""
        return self._report()

    async def record_routing_stats(self) -> dict[str, Any]:
        return self._report()

    def _report(self) -> dict[str, Any]:
        return dict(Report(version=0, held=self._desk.held.amounts(), served=self._served))

    async def echo(self, text: str) -> str | Refusal:
        """What it says to `text`."""
        told, _, _ = text.partition(" ")
        if told == REFUSE:
            return Refusal("busy", "it was told to refuse", 1.2, Outcome.SHED)
        if told == RAISE:
            raise ValueError("it was told to raise")
        if told == SLOW:
            await asyncio.Event().wait()
        self._served += 1
        return text
