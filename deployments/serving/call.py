"""The one way in which a gateway has a replica answer: choose, send, retry, resume, give up.

Whatever differs by kind is in an *errand*. `Caller.answer` is for errands with one reply; when that takes much longer
than predicted, another replica is asked too, and the first reply wins. `Caller.stream` is for those answered piece by
piece; when a replica is silent for too long, another goes on after the pieces that came.

Once a replica has failed a request, its deadline no longer counts: late is better than lost.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, TypeVar

from pliant.deployments.serving.courier import Courier
from pliant.deployments.serving.errand import Errand
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.outcome import Outcome, Recorder, RequestError, Retry
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.serving.table import Choice, NoReplicaError, NoTimeError, ReplicaTable

_RETRY_S = 0.05
_MOST_FAILED = 3
"""Replicas that may fail one request, between two signs of progress, before it is suspected of causing that."""
_MOST_REFUSED = 3
_PATIENCE = 2.5
"""Times the predicted time, after which another replica is asked."""
_LEAST_PATIENCE_S = 0.25
"""However soon an answer is predicted: a busy machine stops processes for as long."""
_SILENCE_S = 10.0
"""Without a piece or a sign of life, after which a replica is left that answers piece by piece."""
_HEDGED_SHARE = 0.1
"""Requests that may ask a second replica, as a share of all: when everything is slow, asking twice makes it slower."""
_HEDGES_SAVED = 10.0

Want = TypeVar("Want")
Query = TypeVar("Query")
Item = TypeVar("Item")


class Attempt(NamedTuple):
    """A replica that was chosen for an errand, where it counts until it is over."""

    choice: Choice
    stalls_at: float
    """By the clock: when it has taken so much longer than predicted that another one had better be asked."""


Streams = Callable[[Parcel[Query]], AsyncGenerator[Item | Refusal | Alive, None]]
"""Has a replica answer the only query of a parcel piece by piece. To close it ends the answer there."""


class Caller(Generic[Want, Query, Item]):
    """Has the replicas of one service answer, those that `table` chooses."""

    def __init__(
        self,
        table: ReplicaTable[Want, Any],
        recorder: Recorder,
        courier: Courier[Query, Item] | None = None,
        streams: Streams[Query, Item] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._recorder = recorder
        self._courier = courier
        self._streams = streams
        self._now = now
        self._hedges = 1.0
        """That may be made now."""

    async def answer(self, errand: Errand[Want, Query, Item]) -> tuple[Item, bool]:
        """The reply to `errand`, and whether its deadline was given up for it. Raises RequestError."""
        assert self._courier
        self._hedges = min(_HEDGES_SAVED, self._hedges + _HEDGED_SHARE)
        course = _Course(errand, self._table, self._recorder, self._now)
        asked = _Asked(self._table, self._courier)
        try:
            while True:
                if not asked.replies:
                    asked.ask(await course.choose(), errand.query(course.late))
                done = await asked.done(min(course.until, asked.stalls_at) - self._now())
                if not done:
                    self._hurry(course, asked)
                for attempt, reply in done:
                    if isinstance(reply, (ReplicaLeftError, NotDeployedError)):
                        course.unsent()
                    elif isinstance(reply, Exception):
                        course.failed(attempt.choice.replica, "lost", str(reply) or "it died")
                    elif isinstance(reply, Refusal):
                        await course.heed(attempt.choice.replica, reply)
                    else:
                        self._table.answered(attempt.choice.replica)
                        return reply, course.late
        finally:
            asked.leave()

    def _hurry(self, course: _Course[Want, Query, Item], asked: _Asked[Want, Query, Item]) -> None:
        """Those that were asked take too long: suspect them, and ask one more if that may help.

        Raises RequestError when it is time to give up.
        """
        if self._now() >= course.until:
            raise course.errand.unanswered()
        for replica in asked.suspected():
            self._table.failed(replica)
        course.late = True
        if self._hedges >= 1 and len(asked.replies) == 1 and (attempt := course.choose_now()):
            self._hedges -= 1
            self._recorder.retried("stalled")
            asked.ask(attempt, course.errand.query(course.late))

    async def stream(self, errand: Errand[Want, Query, Item]) -> AsyncGenerator[Item, None]:
        """The pieces of the answer to `errand`. Raises RequestError, perhaps after some of them.

        To close it ends the answer in the replica.
        """
        course = _Course(errand, self._table, self._recorder, self._now)
        attempt: Attempt | None = None
        while True:
            attempt = attempt or await course.choose()
            async with aclosing(self._pieces(course, attempt)) as pieces:
                async for item in pieces:
                    last = errand.take(item)
                    yield item
                    if last:
                        self._table.answered(attempt.choice.replica)
                        return
                    course.got_on()  # only now: a client that reads slowly is no standstill
            attempt = course.next

    async def _pieces(self, course: _Course[Want, Query, Item], attempt: Attempt) -> AsyncGenerator[Item, None]:
        """What one replica says to the errand, up to where another one is to go on; raises RequestError if none is."""
        assert self._streams
        parcel = Parcel(attempt.choice.replica, self._table.gateway, (course.errand.query(course.late),))
        try:
            async with aclosing(self._streams(parcel)) as items:
                while (item := await self._next(items, course, attempt.choice.replica)) is not None:
                    if isinstance(item, Refusal):
                        await course.heed(attempt.choice.replica, item)
                        return
                    if not isinstance(item, Alive):
                        yield item
        except (ReplicaLeftError, NotDeployedError):
            course.unsent()
        except (ReplicaLostError, StopAsyncIteration) as error:
            course.failed(attempt.choice.replica, "lost", str(error) or "it died")
        finally:
            self._table.done(attempt.choice)

    async def _next(
        self,
        items: AsyncGenerator[Item | Refusal | Alive, None],
        course: _Course[Want, Query, Item],
        replica: str,
    ) -> Item | Refusal | Alive | None:
        """The next item of `items`; None once another replica is to go on. Raises RequestError at the end."""
        coming = asyncio.ensure_future(anext(items))
        try:
            while not (await asyncio.wait((coming,), timeout=min(_SILENCE_S, course.until - self._now())))[0]:
                if self._now() >= course.until:
                    raise course.errand.unanswered()
                if course.moves_on(replica):
                    return None
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait((coming,))


class _Course(Generic[Want, Query, Item]):
    """How far one request has come."""

    def __init__(
        self,
        errand: Errand[Want, Query, Item],
        table: ReplicaTable[Want, Any],
        recorder: Recorder,
        now: Callable[[], float],
    ) -> None:
        self.errand = errand
        self.late = False
        """Whether a replica failed it, so that its deadline no longer counts."""
        self.next: Attempt | None = None
        """With whom to go on, if that is known."""
        self._table = table
        self._recorder = recorder
        self._now = now
        self._moved = now()
        """When it last got on."""
        self._begun = False
        """Whether the client has a part of the answer."""
        self._failed = 0
        """Replicas that failed it since it last got on."""
        self._avoid: set[str] = set()
        self._refusals: list[Refusal] = []

    @property
    def until(self) -> float:
        """When it has stood still for too long."""
        return self._moved + self.errand.timeout_s

    def got_on(self) -> None:
        """The client has one more piece."""
        self._moved = self._now()
        self._begun = True
        self._failed = 0
        self._refusals.clear()

    async def choose(self) -> Attempt:
        """A replica that has neither failed nor refused it lately; waits for one if that makes sense."""
        waiting = False
        while True:
            if attempt := self.choose_now():
                return attempt
            if self._refusals and not self._begun:
                raise self.errand.refused(self._refusals)
            if not self.errand.waits:
                raise self.errand.unserved()
            if self._now() >= self.until:
                raise self.errand.unanswered()
            self._avoid.clear()
            self._refusals.clear()
            if waiting:
                await asyncio.sleep(_RETRY_S)
                self.errand.waited()
            waiting = True

    def choose_now(self) -> Attempt | None:
        """The same, if there is one now."""
        try:
            choice = self._table.choose(self.errand.want(self.late), self._avoid)
        except NoReplicaError:
            return None
        except NoTimeError as error:
            raise self.errand.no_time(error) from None
        self._avoid.add(choice.replica)
        patience_s = math.inf
        if choice.predicted_s is not None:
            patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * choice.predicted_s)
        return Attempt(choice, self._now() + patience_s)

    def unsent(self) -> None:
        """A replica had left when it was to be asked."""
        self._recorder.retried("moved")

    def failed(self, replica: str, why: Retry, reason: str) -> None:
        """`replica` failed it; raises RequestError if too many did."""
        self._table.failed(replica)
        self.late = True
        self._failed += 1
        if self._failed == _MOST_FAILED:
            told = f"{self._failed} replicas of {self.errand.subject} failed over this request; the last: {reason}"
            raise RequestError(Outcome.UNAVAILABLE, told)
        self._recorder.retried(why)

    def moves_on(self, replica: str) -> bool:
        """Whether another one than `replica`, which is silent, can go on."""
        self._table.failed(replica)
        self.late = True
        self.next = self.choose_now()
        if self.next:
            self._recorder.retried("stalled")
        return self.next is not None

    async def heed(self, replica: str, refusal: Refusal) -> None:
        """Another replica is to be asked; raises RequestError if none needs to be."""
        if refusal.report:
            self._table.observe(replica, refusal.report)
        if refusal.cause == "failed":
            self.failed(replica, "lost", refusal.reason)
        elif refusal.cause == "moved":
            self._recorder.retried("moved")
        elif refusal.cause == "final":
            raise self.errand.explained(refusal)
        elif refusal.cause == "unable" and await self.errand.renew(refusal):
            self._avoid.clear()
            self._refusals.clear()
            self._recorder.retried("moved")
        else:
            self._refusals.append(refusal)
            if len(self._refusals) == _MOST_REFUSED and not self._begun:
                raise self.errand.refused(self._refusals)
            self._recorder.retried("busy" if refusal.cause == "busy" else "moved")


class _Asked(Generic[Want, Query, Item]):
    """The replicas that one errand was sent to and that have not replied yet."""

    def __init__(self, table: ReplicaTable[Want, Any], courier: Courier[Query, Item]) -> None:
        self.replies: dict[asyncio.Future[Item | Refusal], Attempt] = {}
        self.stalls_at = math.inf
        """When the one that was asked last stalls."""
        self._table = table
        self._courier = courier

    def ask(self, attempt: Attempt, query: Query) -> None:
        """Send `query`."""
        self.replies[self._courier.send(attempt.choice.replica, query)] = attempt
        self.stalls_at = attempt.stalls_at

    async def done(self, within_s: float) -> list[tuple[Attempt, Item | Refusal | Exception]]:
        """What has been replied, after some was; nothing if none was `within_s` seconds."""
        timeout = None if within_s == math.inf else within_s
        done, _ = await asyncio.wait(self.replies, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return [(self._over(reply), _found(reply)) for reply in done]

    def suspected(self) -> list[str]:
        """The replicas that stall; they are not told of again."""
        self.stalls_at = math.inf
        return [attempt.choice.replica for attempt in self.replies.values()]

    def leave(self) -> None:
        """Nobody waits for any of them any more."""
        for reply in list(self.replies):
            self._over(reply)
            reply.cancel()

    def _over(self, reply: asyncio.Future[Item | Refusal]) -> Attempt:
        attempt = self.replies.pop(reply)
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
