"""The replicas that one request was sent to, and that have not replied yet. Plain asyncio, without Ray."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Generic, NamedTuple, TypeVar

from pliant.deployments.serving.courier import Courier
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.table import Choice, ReplicaTable
from pliant.deployments.serving.tracing import Trial

Want = TypeVar("Want")
Query = TypeVar("Query")
Item = TypeVar("Item")


class Attempt(NamedTuple, Generic[Query]):
    """A replica that was chosen for an errand, where it counts until it is over."""

    choice: Choice
    query: Query
    patience_s: float
    """After so long without a reply another one had better be asked."""
    trial: Trial | None = None
    """Its span, where there are traces."""

    @property
    def replica(self) -> str:
        return self.choice.replica

    @property
    def trace(self) -> str:
        """What the replica's spans are to be a part of, as `Parcel.traces` has it."""
        return self.trial.parent if self.trial else ""


class Asked(Generic[Want, Query, Item]):
    """The replicas that one errand was sent to and that have not replied yet."""

    def __init__(self, table: ReplicaTable[Want, Any], courier: Courier[Query, Item]) -> None:
        self.replies: dict[asyncio.Future[Item | Refusal], Attempt[Query]] = {}
        self.stalls_at = math.inf
        """By the clock."""
        self.stalls = 0
        """Since the last one was asked."""
        self._patience_s = math.inf
        self._table = table
        self._courier = courier

    def ask(self, attempt: Attempt[Query]) -> None:
        """Send its query."""
        self.replies[self._courier.send(attempt.replica, attempt.query, attempt.trace)] = attempt
        self._patience_s = attempt.patience_s
        self.stalls_at = time.monotonic() + self._patience_s
        self.stalls = 0

    @property
    def replicas(self) -> list[str]:
        """That were asked and have not replied."""
        return [attempt.replica for attempt in self.replies.values()]

    async def done(self, until: float) -> list[tuple[Attempt[Query], Item | Refusal | Exception]]:
        """What has been replied, answers first, after some was; nothing if none was `until` then, by the clock."""
        within_s = until - time.monotonic()
        done, _ = await asyncio.wait(self.replies, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        replies = [(reply, _found(reply)) for reply in done]
        found = [(self._over(reply, said), said) for reply, said in replies]
        return sorted(found, key=lambda pair: isinstance(pair[1], (Refusal, Exception)))

    def stall(self) -> None:
        """They stall, and have one patience more."""
        self.stalls_at = time.monotonic() + self._patience_s
        self.stalls += 1

    def leave(self) -> None:
        """Nobody waits for any of them any more."""
        for reply in list(self.replies):
            self._over(reply, None)
            reply.cancel()

    def _over(self, reply: asyncio.Future[Item | Refusal], found: Item | Refusal | Exception | None) -> Attempt[Query]:
        attempt = self.replies.pop(reply)
        if attempt.trial:
            attempt.trial.over(found)
        self._table.done(attempt.choice)
        return attempt


def _found(reply: asyncio.Future[Any]) -> Any:
    """What `reply` came to; an exception of the transport as a value."""
    error = reply.exception()
    if error is None:
        return reply.result()
    if isinstance(error, Exception):
        return error
    raise error
