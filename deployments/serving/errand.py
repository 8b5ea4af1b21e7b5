"""One request as the call path sees it: what differs by kind, how it is counted, and the words for when it fails."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal

Retry = Literal["lost", "busy", "moved", "stalled"]
"""Why another replica is asked: the last one died or broke down; had no room; held something else; took too long."""

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

    def waited(self) -> None:
        """There was no replica for it until now, which is not its fault."""

    async def renew(self, refusal: Refusal) -> bool:
        """Read anew what a replica is unable to get; whether it differs now."""
        return False

    def refused(self, refusals: Sequence[Refusal]) -> RequestError:
        """What to tell the client when enough replicas have refused."""
        busy = [refusal for refusal in refusals if refusal.cause == "busy"]
        if not busy:
            last = refusals[-1]
            return RequestError(last.outcome, last.reason, last.retry_after_s, last.fault)
        soonest = min(busy, key=lambda refusal: refusal.retry_after_s or 0.0)
        reason = f"{self.subject} is too busy: {soonest.reason}; retry later"
        return RequestError(Outcome.SHED, reason, soonest.retry_after_s or 0.0)

    def unanswered(self) -> RequestError:
        """What to tell the client when it stood still for too long."""
        reason = f"no replica of {self.subject} answered within {round(self.timeout_s, 3):g} s"
        return RequestError(Outcome.UNAVAILABLE, reason, 1.0)

    def unserved(self) -> RequestError:
        """What to tell a client that does not wait for replicas."""
        return RequestError(Outcome.UNAVAILABLE, f"no replica of {self.subject} is there", 1.0)


class Recorder(Protocol):
    """Where a service counts."""

    def ended(self, outcome: Outcome) -> None: ...

    def retried(self, why: Retry) -> None: ...


@dataclass
class Ending:
    """How a request that is answered ends; whoever answers it may say otherwise than well."""

    outcome: Outcome = Outcome.OK


@contextmanager
def counted(recorder: Recorder) -> Iterator[Ending]:
    """Record the one outcome of the request that is answered within."""
    ending = Ending()
    try:
        yield ending
    except RequestError as error:
        recorder.ended(error.outcome)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        recorder.ended(Outcome.CANCELLED)
        raise
    except BaseException:
        recorder.ended(Outcome.FAILED)
        raise
    recorder.ended(ending.outcome)
