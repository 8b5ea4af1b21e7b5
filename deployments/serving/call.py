"""The one way in which a gateway has a replica answer: choose, send, retry, resume, give up.

Whatever differs by kind is in an *errand*. `Caller.answer` is for errands with one reply; when that takes much longer
than predicted, another replica is asked too, and the first reply wins. `Caller.stream` is for those answered piece by
piece; when a replica is silent for too long, another goes on after the pieces that came. A replica that lets requests
wait is called to see whether it runs (`probing.py`): one that does not is left within seconds.

Once a replica has failed a request, its deadline no longer counts: late is better than lost.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from pliant.deployments.serving import tracing
from pliant.deployments.serving.asked import Asked, Attempt
from pliant.deployments.serving.courier import Courier
from pliant.deployments.serving.errand import Errand
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.logs import worked_on
from pliant.deployments.serving.outcome import Outcome, Recorder, RequestError, Retry
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.serving.table import NoReplicaError, NoTimeError, ReplicaTable

logger = logging.getLogger("pliant")

_RETRY_S = 0.05
_MOST_FAILED = 3
"""Failures over one request, between two signs of progress, after which it is suspected of causing them."""
_SPARED_S = 2.0
"""How long those that failed a request are not asked again, as long as another one runs; at most."""
_SPARED_SHARE = 0.25
"""The same as a share of the time that a request may stand still."""
_MOST_REFUSED = 3
_PATIENCE = 2.5
"""Times the predicted time, after which another replica is asked."""
_LEAST_PATIENCE_S = 0.25
"""However soon an answer is predicted: a busy machine stops processes for as long."""
_UNPREDICTED_PATIENCE = 0.25
"""The same where nobody can predict, as a share of the time that a request may stand still: it must leave in time."""
_QUIET_S = 1.0
"""After which it is looked whether the replica still runs: one that does not is left."""
_SILENCE_S = 10.0
"""Without a piece or a sign of life, after which a replica is left that answers piece by piece, though it runs."""
_HEDGED_SHARE = 0.1
"""Requests that may ask a second replica, as a share of all: when everything is slow, asking twice makes it slower."""
_HEDGES_SAVED = 10.0
_STALLS = 3
"""Times its patience, after which a request leaves a replica that nobody would choose now, however many do."""

Want = TypeVar("Want")
Query = TypeVar("Query")
Item = TypeVar("Item")


Streams = Callable[[Parcel[Query]], AsyncGenerator[Item | Refusal | Alive, None]]
"""Has a replica answer the only query of a parcel piece by piece; raises what a `Transport` does.

To close it ends the answer there."""


class Caller(Generic[Want, Query, Item]):
    """Has the replicas of one service answer, those that `table` chooses."""

    def __init__(
        self,
        table: ReplicaTable[Want, Any],
        recorder: Recorder,
        courier: Courier[Query, Item] | None = None,
        streams: Streams[Query, Item] | None = None,
    ) -> None:
        self._table = table
        self._recorder = recorder
        self._courier = courier
        self._streams = streams
        self._hedges = 1.0
        """That may be made now."""

    async def answer(self, errand: Errand[Want, Query, Item]) -> tuple[Item, bool]:
        """The reply to `errand`, and whether its deadline was given up for it. Raises RequestError."""
        assert self._courier
        self._hedges = min(_HEDGES_SAVED, self._hedges + _HEDGED_SHARE)
        course = _Course(errand, self._table, self._recorder)
        asked = Asked(self._table, self._courier)
        try:
            while True:
                if not asked.replies:
                    asked.ask(await course.choose())
                done = await asked.done(min(course.until, asked.stalls_at, time.monotonic() + _QUIET_S))
                if not done:
                    self._hurry(course, asked)
                for attempt, reply in done:
                    if isinstance(reply, (ReplicaLeftError, NotDeployedError)):
                        course.unsent()
                    elif isinstance(reply, Exception):
                        course.failed(attempt.replica, "lost", str(reply) or "it died")
                    elif isinstance(reply, Refusal):
                        await course.heed(attempt.replica, reply)
                    else:
                        self._table.answered(attempt.replica)
                        return reply, course.late
        finally:
            asked.leave()

    def _hurry(self, course: _Course[Want, Query, Item], asked: Asked[Want, Query, Item]) -> None:
        """Those that were asked let it wait: doubt them, and ask one more if they stall and that may help.

        Raises RequestError when it is time to give up.
        """
        now = time.monotonic()
        if now >= course.until:
            raise course.errand.unanswered()
        replicas = asked.replicas
        for replica in replicas:
            self._table.doubt(replica)
        gone = all(map(self._table.suspected, replicas))
        if now < asked.stalls_at and not gone:
            return
        asked.stall()
        course.stalled(replicas)
        hedges = self._hedges >= 1 and len(replicas) == 1
        leaves = gone or (asked.stalls >= _STALLS and not any(map(self._table.usable, replicas)))
        if (hedges or leaves) and (attempt := course.another(replicas)):
            self._hedges -= hedges
            asked.ask(attempt)

    async def stream(self, errand: Errand[Want, Query, Item]) -> AsyncGenerator[Item, None]:
        """The pieces of the answer to `errand`. Raises RequestError, perhaps after some of them.

        To close it ends the answer in the replica.
        """
        course = _Course(errand, self._table, self._recorder)
        try:
            while True:
                attempt = await course.choose()
                async with aclosing(self._pieces(course, attempt)) as pieces:
                    async for item in pieces:
                        last = errand.take(item)
                        if attempt.trial:
                            attempt.trial.got(item)
                        yield item
                        if last:
                            if attempt.trial:
                                attempt.trial.over(item)
                            self._table.answered(attempt.replica)
                            return
                        course.got_on()  # only now: a client that reads slowly is no standstill
        finally:
            course.leave()

    async def _pieces(self, course: _Course[Want, Query, Item], attempt: Attempt[Query]) -> AsyncGenerator[Item, None]:
        """What one replica says to the errand, up to where another one is to go on; raises RequestError if none is."""
        assert self._streams
        parcel = Parcel(attempt.replica, self._table.gateway, (attempt.query,), (worked_on(),), (attempt.trace,))
        end: Refusal | Exception | None = None
        try:
            async with aclosing(self._streams(parcel)) as items:
                while (item := await self._next(items, course, attempt.replica)) is not None:
                    if isinstance(item, Refusal):
                        end = item
                        await course.heed(attempt.replica, item)
                        return
                    if not isinstance(item, Alive):
                        yield item
        except (ReplicaLeftError, NotDeployedError) as error:
            end = error
            course.unsent()
        except (ReplicaLostError, StopAsyncIteration) as error:
            end = error
            course.failed(attempt.replica, "lost", str(error) or "it died")
        finally:
            if attempt.trial:
                attempt.trial.over(end)
            self._table.done(attempt.choice)

    async def _next(
        self,
        items: AsyncGenerator[Item | Refusal | Alive, None],
        course: _Course[Want, Query, Item],
        replica: str,
    ) -> Item | Refusal | Alive | None:
        """The next item of `items`; None once another replica is to go on. Raises RequestError at the end."""
        coming = asyncio.ensure_future(anext(items))
        stalls_at = time.monotonic() + _SILENCE_S
        try:
            while True:
                within_s = min(_QUIET_S, min(course.until, stalls_at) - time.monotonic())
                if (await asyncio.wait((coming,), timeout=max(0.0, within_s)))[0]:
                    return coming.result()
                if (now := time.monotonic()) >= course.until:
                    raise course.errand.unanswered()
                self._table.doubt(replica)
                if now < stalls_at and not self._table.suspected(replica):
                    continue
                stalls_at = now + _SILENCE_S
                if course.moves_on(replica):
                    return None
        finally:
            await _end(coming)


class _Course(Generic[Want, Query, Item]):
    """How far one request has come."""

    def __init__(
        self,
        errand: Errand[Want, Query, Item],
        table: ReplicaTable[Want, Any],
        recorder: Recorder,
    ) -> None:
        self.errand = errand
        self.late = False
        """Whether a replica failed it, so that its deadline no longer counts."""
        self._table = table
        self._recorder = recorder
        self._moved = time.monotonic()
        """When it last got on."""
        self._begun = False
        """Whether the client has a part of the answer."""
        self._why: Retry | None = None
        """Why another replica is to be asked, if so: it is counted once one is."""
        self._next: Attempt[Query] | None = None
        """With whom to go on, if that is known."""
        self._failed: Counter[str] = Counter()
        """How often each replica failed it since it last got on."""
        self._failed_at = 0.0
        """By the clock, when the last one did."""
        self._reason = ""
        """Why it did."""
        self._avoid: set[str] = set()
        self._refusals: dict[str, Refusal] = {}
        """By replica; those that refused are not asked again."""
        self._unable = 0
        """Times since it last got on that a replica could not get what it names."""

    @property
    def until(self) -> float:
        """When it has stood still for too long."""
        return self._moved + self.errand.timeout_s

    def got_on(self) -> None:
        """The client has one more piece."""
        self._moved = time.monotonic()
        self._begun = True
        self._unable = 0
        self._failed.clear()
        self._refusals.clear()

    async def choose(self) -> Attempt[Query]:
        """A replica that has neither failed nor refused it lately; waits for one if that makes sense."""
        with tracing.choosing():
            return await self._chosen()

    async def _chosen(self) -> Attempt[Query]:
        attempt, self._next = self._next, None
        while not (attempt := attempt or self._choose_now(self._why)):
            if self._failed.total() >= _MOST_FAILED:
                raise RequestError(Outcome.UNAVAILABLE, f"{self._failures}; the last: {self._reason}")
            if self._refusals and (self._refused or not self._begun):
                raise self.errand.refused(list(self._refusals.values()))
            if not self.errand.waits:
                raise self._absent(self.errand.unserved())
            if time.monotonic() >= self.until:
                raise self._absent(self.errand.unanswered())
            self._table.let_in(self._failed)
            await asyncio.sleep(_RETRY_S)
            self.errand.waited()
            self._avoid = set(self._failed) if self._spares else set()
            self._refusals.clear()
        if self._why:
            self._recorder.retried(self._why)
            self._why = None
        return attempt

    def _absent(self, error: RequestError) -> RequestError:
        """`error`, that there is no replica: it is of no use to come back before one has started."""
        if not self._table.running:
            error.retry_after_s = max(error.retry_after_s or 0.0, self._table.starts_within_s)
        return error

    @property
    def _spares(self) -> bool:
        """Whether those that failed it are not asked again yet."""
        spared_s = min(_SPARED_S, _SPARED_SHARE * self.errand.timeout_s)
        return time.monotonic() < self._failed_at + spared_s and self._table.runs_another(self._failed)

    @property
    def _failures(self) -> str:
        times, number = self._failed.total(), len(self._failed)
        told = f"{number} replica{'s' * (number > 1)} of {self.errand.subject} failed over this request"
        return told if times == number else f"{told}, {times} times in all"

    def another(self, replicas: Collection[str]) -> Attempt[Query] | None:
        """One more than `replicas`, which were asked and stall, if there is one; it may have failed before."""
        self._avoid.update(replicas)
        before, self.late = self.late, True
        try:
            if not (attempt := self._choose_now("stalled")):
                self._avoid = {*replicas, *self._refusals}
                attempt = self._choose_now("stalled")
        except RequestError:  # it had better not be answered, but it may still be
            attempt = None
        if attempt:
            self._recorder.retried("stalled")
        else:
            self.late = before
        return attempt

    def unsent(self) -> None:
        """A replica had left when it was to be asked."""
        self._why = "moved"

    def failed(self, replica: str, why: Retry, reason: str) -> None:
        """`replica` failed it."""
        self._table.failed(replica)
        logger.warning("%s: replica %s failed a request: %s", self.errand.subject, replica, reason)
        self.late = True
        self._failed[replica] += 1
        self._failed_at = time.monotonic()
        self._reason = reason
        self._why = why

    def stalled(self, replicas: Collection[str]) -> None:
        """`replicas` have let it wait for too long, again perhaps."""
        for replica in replicas:
            self._table.failed(replica)

    def moves_on(self, replica: str) -> bool:
        """Whether another one than `replica`, which is silent, can go on."""
        self.stalled((replica,))
        self._next = self.another((replica,))
        return self._next is not None

    def leave(self) -> None:
        """Nobody waits for an answer any more."""
        if self._next:
            if self._next.trial:
                self._next.trial.over(None)
            self._table.done(self._next.choice)

    async def heed(self, replica: str, refusal: Refusal) -> None:
        """Another replica is to be asked; raises RequestError if none needs to be."""
        if refusal.report:
            self._table.observe(replica, refusal.report)
        if refusal.cause == "failed":
            self.failed(replica, "lost", refusal.reason)
        elif refusal.cause == "final":
            raise self.errand.explained(refusal)
        elif refusal.cause == "moved":
            self._why = "moved"
        elif refusal.cause == "unable" and await self._renewed(refusal):
            self._avoid.clear()
            self._refusals.clear()
            self._unable = 0
            self._why = "moved"
        else:
            self._refusals[replica] = refusal
            self._unable += refusal.cause == "unable"
            self._why = "busy" if refusal.cause == "busy" else "moved"

    async def _renewed(self, refusal: Refusal) -> bool:
        try:
            async with asyncio.timeout(self.until - time.monotonic()):
                return await self.errand.renew(refusal)
        except TimeoutError:
            raise self.errand.unanswered() from None

    @property
    def _refused(self) -> bool:
        """Whether enough have refused it; what has begun waits for room, but not for what replicas cannot get."""
        return (self._unable if self._begun else len(self._refusals)) >= _MOST_REFUSED

    def _choose_now(self, why: Retry | None) -> Attempt[Query] | None:
        """Another one is asked for `why`, if so. None also when enough have failed it, or refused it."""
        if self._failed.total() >= _MOST_FAILED or self._refused:
            return None
        want, query = self.errand.want(self.late), self.errand.query(self.late)
        try:
            choice = self._table.choose(want, self._avoid)
        except NoReplicaError:
            return None
        except NoTimeError as error:
            raise self.errand.no_time(error) from None
        self._avoid.add(choice.replica)
        if choice.predicted_s is None:
            patience_s = _UNPREDICTED_PATIENCE * self.errand.timeout_s
        else:
            patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * choice.predicted_s)
        trial = tracing.trial(self.errand.subject, choice.replica, why, self.errand.facts)
        return Attempt(choice, query, patience_s, trial)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel `task` and wait for its end, however often the caller is cancelled meanwhile: anyio does so every turn."""
    task.cancel()
    left: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            left = error
    if not task.cancelled():
        task.exception()  # asyncio complains of those that nobody looked at
    if left:
        raise left
