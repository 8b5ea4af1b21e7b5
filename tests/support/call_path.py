"""What a gateway has of one service, of any kind, over replicas that a test plays: a table, a caller, and a recorder.

Without Ray, and by the event loop's clock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.courier import Courier
from pliant.deployments.serving.least_held import LeastHeld, Share
from pliant.deployments.serving.outcome import Outcome, Retry
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal, Report
from pliant.deployments.serving.table import ReplicaTable

Query = TypeVar("Query")
Item = TypeVar("Item")
R = TypeVar("R", bound=Report)


class CallPath(Generic[Query, Item, R]):
    """Its kind plays the replicas, in `one` or in `pieces`, and records answers. `report` is what idle ones report."""

    def __init__(self, names: Iterable[str], report: Callable[[], R]) -> None:
        self.recorded: list[Any] = []
        """Why others were asked, and what the kind records."""
        self.ends: list[Outcome] = []
        self.table: ReplicaTable[Share, R] = ReplicaTable(LeastHeld())
        courier: Courier[Query, Item] = Courier(self.table.gateway, self)
        self.caller: Caller[Share, Query, Item] = Caller(self.table, self, courier, self.pieces)
        self._report = report
        self.run(*names)

    def run(self, *names: str) -> None:
        """These replicas run now, and no others, and are idle as far as they report."""
        self.table.sync({name: self._report() for name in names})

    def chosen(self, near: str | None = None) -> str:
        """The replica that a request would be sent to now."""
        choice = self.table.choose(Share(1, near))
        self.table.done(choice)
        return choice.replica

    async def one(self, parcel: Parcel[Query]) -> Item | Refusal:
        """As `Transport.one`."""
        raise NotImplementedError

    async def several(self, parcel: Parcel[Query]) -> AsyncGenerator[Sequence[tuple[int, Item | Refusal]], None]:
        """As `Transport.several`, one after the other."""
        for index, query in enumerate(parcel.queries):
            yield [(index, await self.one(parcel._replace(queries=(query,))))]

    def pieces(self, parcel: Parcel[Query]) -> AsyncGenerator[Item | Refusal | Alive, None]:
        """As `call.Streams`."""
        raise NotImplementedError

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome)

    def retried(self, why: Retry) -> None:
        self.recorded.append(why)
