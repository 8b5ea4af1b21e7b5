"""Replicas of all kinds that break as `faults` are ordered, and are else as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from support.echo.replica import EchoReplica

from e2e.faults import Orders
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.llm.replica import LlmReplica
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.vision.replica import VisionReplica

REFUSAL = Refusal("busy", "it was ordered to refuse", 1.0, Outcome.SHED)


class Breakable:
    """Stands before a kind's replica."""

    async def __init__(self, service: str, config: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self.orders = Orders(service)
        made: Any = super().__init__(service, config)  # type: ignore[call-arg]
        if made is not None:
            await made
        self.tap()

    def tap(self) -> None:
        """From now on `orders` are obeyed before whatever is computed in this process."""

    async def answer(self, parcel: Parcel[Any]) -> Any:
        """As the kind's."""
        if self.orders.fault() == "refuses":
            return REFUSAL
        return await super().answer(parcel)  # type: ignore[misc]

    async def answers(self, parcel: Parcel[Any]) -> AsyncGenerator[Any, None]:
        """As the kind's."""
        if self.orders.fault() == "refuses":
            yield [(index, REFUSAL) for index in range(len(parcel.queries))]
            return
        async with aclosing(super().answers(parcel)) as parts:  # type: ignore[misc]
            async for part in parts:
                yield part

    async def generate(self, parcel: Parcel[Any]) -> AsyncGenerator[Any, None]:
        """As the kind's."""
        if self.orders.fault() == "refuses":
            yield REFUSAL
            return
        async with aclosing(super().generate(parcel)) as pieces:  # type: ignore[misc]
            async for piece in pieces:
                yield piece


class BreakableEncoder(Breakable, EncoderReplica):
    def tap(self) -> None:
        from pliant.kernels.encoder.compiled_classifier import Runtime
        from pliant.kernels.encoder.packed_runtime import PackedRuntime

        Runtime.run = self.orders.first(Runtime.run)  # type: ignore[method-assign]
        PackedRuntime.run_all = self.orders.first(PackedRuntime.run_all)  # type: ignore[method-assign]


class BreakableLlm(Breakable, LlmReplica):
    def tap(self) -> None:
        from pliant.kernels.decoder.executor import Executor

        Executor.launch = self.orders.first(Executor.launch)  # type: ignore[method-assign]


class BreakableVision(Breakable, VisionReplica):
    def tap(self) -> None:
        from pliant.kernels.vision.executor import VisionExecutor

        VisionExecutor.run = self.orders.first(VisionExecutor.run)  # type: ignore[method-assign]


class BreakableEcho(Breakable, EchoReplica):
    async def echo(self, text: str) -> str | Refusal:
        await asyncio.to_thread(self.orders.compute)
        return await super().echo(text)


BREAKABLE: dict[str, type] = {
    "encoder": BreakableEncoder,
    "llm": BreakableLlm,
    "vision": BreakableVision,
    "echo": BreakableEcho,
}
"""By kind."""
