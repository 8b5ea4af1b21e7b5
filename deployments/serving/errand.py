"""One request as the call path sees it: what differs by kind, and the words for when it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.table import NoTimeError
from pliant.deployments.serving.tenants import current
from pliant.deployments.serving.tracing import Attributes

Want = TypeVar("Want")
Query = TypeVar("Query")
Item = TypeVar("Item")


class Errand(ABC, Generic[Want, Query, Item]):
    """One request, as its kind sees it."""

    subject: str
    """What is to answer, in words."""
    timeout_s: float
    """How long it may stand still."""
    waits: bool = True
    """Whether it waits for replicas when there are none."""

    def __init__(self) -> None:
        self.tenant = current().tenant
        """Whose it is; its queries say so, as their `tenant`."""

    @abstractmethod
    def want(self, late: bool) -> Want:
        """What the chooser needs to know of it now; `late` once the deadline no longer counts.

        May raise RequestError when there is no time left.
        """

    @abstractmethod
    def query(self, late: bool) -> Query:
        """What is left to do of it, for the replica."""

    def take(self, item: Item) -> bool:
        """Note that the client is given `item`; whether it is the last."""
        return True

    def facts(self, item: Item) -> Attributes:
        """What a trace says of the answer that ends with `item`."""
        return {}

    def waited(self) -> None:
        """There was no replica for it until now, which is not its fault."""

    async def renew(self, refusal: Refusal) -> bool:
        """Read anew what a replica is unable to get; whether it differs now."""
        return False

    def explained(self, refusal: Refusal) -> RequestError:
        """What to answer the client for a refusal that nobody can do better than."""
        return RequestError(refusal.outcome, refusal.reason, refusal.retry_after_s, refusal.fault)

    def refused(self, refusals: Sequence[Refusal]) -> RequestError:
        """What to answer the client when enough replicas have refused."""
        busy = [refusal for refusal in refusals if refusal.cause == "busy"]
        if not busy:
            return self.explained(refusals[-1])
        soonest = min(busy, key=lambda refusal: refusal.retry_after_s or 0.0)
        reason = f"{self.subject} is too busy: {soonest.reason}; retry later"
        return RequestError(Outcome.SHED, reason, soonest.retry_after_s or 0.0)

    def no_time(self, error: NoTimeError) -> RequestError:
        """What to answer the client when no replica can meet the deadline."""
        return RequestError(Outcome.SHED, f"{self.subject} is too busy; retry later", error.retry_after_s)

    def unanswered(self) -> RequestError:
        """What to answer the client when it stood still for too long."""
        reason = f"no replica of {self.subject} answered within {round(self.timeout_s, 3):g} s"
        return RequestError(Outcome.UNAVAILABLE, reason, 1.0, Fault.TIMED_OUT)

    def unserved(self) -> RequestError:
        """What to answer a client that does not wait for replicas."""
        return RequestError(Outcome.UNAVAILABLE, f"no replica of {self.subject} is there", 1.0, Fault.DOWN)
