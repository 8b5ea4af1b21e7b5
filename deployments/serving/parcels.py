"""What travels between a gateway and a replica of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.message import message

Query = TypeVar("Query")
Other = TypeVar("Other")

Cause = Literal["busy", "moved", "unable", "failed", "final"]
"""Why a replica does not answer.

"busy": others may have room. "moved": it holds something else by now, as its report says, and who holds what is known
anew. "unable": it cannot get what the query names, an adapter or a task; that may have changed, and another may.
"failed": something broke here. "final": no replica can do better.
"""


class Report(TypedDict):
    """What a replica of any kind says of itself about once a second; each kind adds to it."""

    version: int
    """The newer of two reports has the greater, or the same."""
    held: dict[str, float]
    """By gateway: what its requests here amount to, in the unit that the kind's chooser counts in."""
    served: int


@message
@dataclass(frozen=True, slots=True)
class Refusal:
    """A replica's word that it does not answer a query, or not any more."""

    cause: Cause
    reason: str
    retry_after_s: float | None = None
    outcome: Outcome = Outcome.UNAVAILABLE
    """What becomes of the request if no other replica answers it."""
    fault: Fault | None = None
    """As of that outcome."""
    report: Mapping[str, Any] | None = None
    """What the replica says of itself now, if the gateway chose it by mistake."""


@message
class Parcel(NamedTuple, Generic[Query]):
    """Queries on their way to the replica that the gateway chose for them."""

    replica: str
    gateway: str
    queries: tuple[Query, ...]
    requests: tuple[str, ...] = ()
    """Ids of the requests that they belong to, one for each; none: they are nobody's."""
    traces: tuple[str, ...] = ()
    """W3C traceparents of the spans that they belong to, one for each, empty of one without; none: none is traced."""

    def instead(self, *queries: Other) -> Parcel[Other]:
        """The same with these in the place of as many queries."""
        return Parcel(self.replica, self.gateway, queries, self.requests, self.traces)

    def trace(self, index: int) -> str:
        """Of the query of this `index`; empty: it is not traced."""
        return self.traces[index] if self.traces else ""

    def request(self, index: int) -> str:
        """That the query of this `index` belongs to; empty: nobody's."""
        return self.requests[index] if self.requests else ""


@message
class Alive(NamedTuple):
    """In a stream of pieces: there is none yet, and the replica works on it, or has it wait its turn."""
