"""What a gateway has of one service, of any kind, over replicas that a test plays: a table, a caller, and a recorder.

Without Ray, and by the event loop's clock.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from pliant.deployments.serving.call import Caller, Streams
from pliant.deployments.serving.courier import Courier, Transport
from pliant.deployments.serving.least_held import LeastHeld, Share
from pliant.deployments.serving.outcome import Outcome, Retry
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal, Report
from pliant.deployments.serving.table import Chooser, ReplicaTable

Want = TypeVar("Want")
Query = TypeVar("Query")
Item = TypeVar("Item")
R = TypeVar("R", bound=Report)
Rec = TypeVar("Rec", bound="Recorder")


class Recorder:
    """Keeps all it is told."""

    def __init__(self) -> None:
        self.ends: list[Outcome] = []
        self.retries: list[Retry] = []
        self.events: list[Any] = []
        """What only a kind records."""

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome)

    def retried(self, why: Retry) -> None:
        self.retries.append(why)


class CallPath(Generic[Want, Query, Item, R, Rec]):
    """To the replicas that `transport` and `streams` know, those that `chooser` chooses."""

    def __init__(
        self,
        chooser: Chooser[Want, R],
        transport: Transport[Query, Item],
        recorder: Rec,
        streams: Streams[Query, Item] | None = None,
    ) -> None:
        self.recorder = recorder
        self.table: ReplicaTable[Want, R] = ReplicaTable(chooser)
        courier: Courier[Query, Item] = Courier(self.table.gateway, transport)
        self.caller: Caller[Want, Query, Item] = Caller(self.table, self.recorder, courier, streams)


class Played(CallPath[Share, Query, Item, R, Rec]):
    """Its kind plays the replicas, in `one` or in `pieces`. `report` is what idle ones report."""

    def __init__(self, names: Iterable[str], report: Callable[[], R], recorder: Rec) -> None:
        super().__init__(LeastHeld(), self, recorder, self.pieces)
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
