"""The replica's side of a call: counts what it has of each gateway, answers parcels, and notes what breaks down.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from pliant.deployments.serving import tracing
from pliant.deployments.serving.errors import OutdatedPlannerError
from pliant.deployments.serving.logs import work_on
from pliant.deployments.serving.parcels import Parcel, Refusal

logger = logging.getLogger("pliant")

_MOST_BROKEN = 3
"""Queries in a row over which the executor broke down, after which the replica had better be replaced."""

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class Held:
    """What a replica has of each gateway."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, float]] = {}
        """By gateway: how many queries, and what they amount to."""

    @contextmanager
    def of(self, gateway: str, amount: float) -> Iterator[None]:
        """One more query of `gateway` is held."""
        number, held = self._held.get(gateway, (0, 0.0))
        self._held[gateway] = number + 1, held + amount
        try:
            yield
        finally:
            number, held = self._held.pop(gateway)
            if number > 1:
                self._held[gateway] = number - 1, max(0.0, held - amount)

    def amounts(self) -> dict[str, float]:
        """By gateway, for `Report.held`."""
        return {gateway: amount for gateway, (_, amount) in self._held.items()}


class Obedience:
    """To the newest planner that a replica has heard of."""

    def __init__(self) -> None:
        self._epoch = 0

    def check(self, epoch: int) -> None:
        """Raise OutdatedPlannerError if a planner of that epoch is not the newest."""
        if 0 < epoch < self._epoch:
            raise OutdatedPlannerError("another planner has taken over")
        self._epoch = max(self._epoch, epoch)


class Desk(Generic[Query, Answer]):
    """Has `engine` answer queries, each of which amounts to `weight(query)`; `compute_s` says how long an answer took.

    An exception of the engine's is a refusal, so that another replica is asked.
    """

    def __init__(
        self,
        service: str,
        engine: Callable[[Query], Awaitable[Answer | Refusal]],
        weight: Callable[[Query], float] = lambda _query: 1.0,
        compute_s: Callable[[Answer], float] = lambda _answer: 0.0,
    ) -> None:
        self._service = service
        self._compute_s = compute_s
        self._engine = engine
        self._weight = weight
        self.held = Held()
        self._broken = 0
        self._last = ""

    def check(self) -> None:
        """Raise RuntimeError if one query after the other broke the engine down."""
        if self._broken >= _MOST_BROKEN:
            raise RuntimeError(f"{self._broken} queries in a row broke down, the last with {self._last}")

    async def one(self, parcel: Parcel[Query]) -> Answer | Refusal:
        """The reply to the only query of `parcel`."""
        return await self._answer(parcel, 0)

    async def several(self, parcel: Parcel[Query]) -> AsyncGenerator[list[tuple[int, Answer | Refusal]], None]:
        """Replies as they are made, each with the index of its query; those that are made together come together."""
        tasks = {asyncio.create_task(self._answer(parcel, index)): index for index in range(len(parcel.queries))}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                yield [(tasks.pop(task), task.result()) for task in done]
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, parcel: Parcel[Query], index: int) -> Answer | Refusal:
        work_on(parcel.request(index))
        work = tracing.work(self._service, parcel.trace(index))
        if work is None:
            return await self._reply(parcel.gateway, parcel.queries[index])
        with work:
            reply = await self._reply(parcel.gateway, parcel.queries[index])
            if not isinstance(reply, Refusal):
                work.part("queue", but_s=self._compute_s(reply))
                work.part("compute")
            return reply

    async def _reply(self, gateway: str, query: Query) -> Answer | Refusal:
        try:
            with self.held.of(gateway, self._weight(query)):
                reply = await self._engine(query)
        except Exception as error:
            self._broken += 1
            self._last = f"{type(error).__name__}: {error}"
            logger.exception("%s: a query broke down", self._service)
            return Refusal("failed", self._last)
        if not isinstance(reply, Refusal):
            self._broken = 0
        return reply
