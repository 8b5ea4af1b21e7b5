"""One replica's images: they wait in batches, each batch gets its gamma, and one at a time is computed (OTAS §III).

Plain asyncio, without Ray and threads: the Serve shell is `replica.py`, what computes is a `Device`. Time is the event
loop's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.vision.messages import Answer, Fate, Query
from pliant.deployments.vision.queue import Queue, Waiting
from pliant.deployments.vision.report import EngineReport, Statistics
from pliant.deployments.vision.tasks import Tasks, key
from pliant.formats.vision_task import TaskError
from pliant.policies.vision.longest_batch import LongestBatch
from pliant.policies.vision.pace import Pace
from pliant.policies.vision.slo_batching import Batching
from pliant.policies.vision.token_adaptation import Policy, Step
from pliant.policies.vision.token_profile import TokenProfile
from pliant.policies.vision.value_curve import Asked, earnings

logger = logging.getLogger("pliant")

_MOST_BROKEN = 3
"""Batches in a row whose computation may break down before the replica counts as broken."""
_RETRY_S = 0.1
_PATIENCE = 2.5
"""Times what is foreseen of a batch, after which what waits behind it had better be answered elsewhere."""
_LEAST_PATIENCE_S = 0.25
"""However soon it is foreseen to end: a busy machine stops processes for as long."""
_LEAD = 2.0
"""Of the time that a decision takes: so long before a batch should end it is decided what runs next."""
_EVICTION_LAG_S = 0.001
"""By how much later than it is certain a query is evicted, so that timers do not fire too early."""


class ClosedError(Exception):
    """The replica stops."""


class Device(Protocol):
    """What computes, one batch at a time."""

    @property
    def backend(self) -> str: ...

    async def ready(self) -> None:
        """Wait until nothing else is computed, so that a batch begins at once."""

    async def run(self, images: Sequence[bytes], tasks: Sequence[str], gamma: int) -> Sequence[NDArray[np.float32]]:
        """The logits of each image, by its task's labels. `tasks` are keys as of `tasks.key`."""


class Engine:
    """Answers each query once. At most `limit` wait; `policy` decides which batch runs next, and with which gamma.

    `tasks` are in the memory of `device`, whose latencies are those of `profile`, on which `policy` relies, too: what
    batches really take corrects it. `batching` says which images wait together. Must be created in a running event
    loop.
    """

    def __init__(
        self,
        device: Device,
        tasks: Tasks,
        profile: TokenProfile,
        policy: Policy[Waiting],
        limit: int,
        batching: Batching | None = None,
    ) -> None:
        self._device = device
        self._tasks = tasks
        self._policy = policy
        self._limit = limit
        self._queue = Queue(limit, batching or Batching(most_rows=profile.most_rows))
        self._longest = LongestBatch()
        self._awaiting_tasks = 0
        self._changed = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._running = 0
        self._computing_since: float | None = None
        self._stalls_at = math.inf
        """When the batch under way takes much too long."""
        self._probe: Waiting | None = None
        """What will be computed though it seems to be too late, to see whether it is."""
        self._ahead: Step[Waiting] | None = None
        """What was chosen to run next while a batch still ran."""
        self._broken = 0
        """Batches in a row that could not be computed."""
        self._statistics = Statistics(profile.gammas)
        self._profile = profile
        self._pace = Pace(profile, _now())
        self.failure: Exception | None = None
        """Why nothing is computed any more."""
        self._serving = asyncio.create_task(self._serve())

    def adopt(self, profile: TokenProfile, policy: Policy[Waiting]) -> None:
        """Go by another profile of the same gammas from now on: the device has become faster."""
        self._policy = policy
        self._profile = profile
        self._pace = Pace(profile, _now())
        self._ahead = None

    async def classify(self, query: Query) -> Answer | Refusal:
        """Answer `query`, or say why not as soon as that is known. Whoever is cancelled does not wait any more."""
        if self.failure is not None:
            return _broken_down(self.failure)
        self._statistics.asked.append(Asked(key(query.task), query.utility, query.budget_s))
        if self._awaiting_tasks >= self._limit:
            return self._shed()
        deadline = _now() + query.budget_s
        self._awaiting_tasks += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._tasks.acquire(query.task)
        except TimeoutError:
            self._statistics.evicted += 1
            reason = f"its time was over before the task {query.task.name} was in memory"
            return Refusal("final", reason, _RETRY_S, Outcome.SHED, Fault.EVICTED)
        except TaskError as error:
            return Refusal("unable", str(error), _RETRY_S)
        finally:
            self._awaiting_tasks -= 1
        try:
            return await self._queued(query, deadline)
        finally:
            self._tasks.release(query.task)

    async def _queued(self, query: Query, deadline: float) -> Answer | Refusal:
        if self.failure is not None:
            return _broken_down(self.failure)
        now = _now()
        if now + self._pace.soonest_s > deadline and not self._is_probe(deadline):
            self._statistics.evicted += 1
            left_ms, least_ms = (deadline - now) * 1e3, self._pace.soonest_s * 1e3
            reason = f"{left_ms:.1f} ms were left for it, and it takes {least_ms:.1f} ms at least"
            return Refusal("final", reason, _RETRY_S, Outcome.TOO_LATE)
        reply: asyncio.Future[Answer | Refusal] = asyncio.get_running_loop().create_future()
        waiting = Waiting(query.image, key(query.task), now, deadline, query.utility, query.tenant, reply)
        self._policy.arrived(waiting)
        self._longest.came(query.tenant.name, deadline - now, now)
        if unlucky := self._queue.add(waiting, self._pace.soonest_s):
            unlucky.settle(self._shed())
        self._changed.set()
        self._watch()
        try:
            return await reply
        finally:
            self._queue.remove(waiting)

    def report(self) -> EngineReport:
        statistics = self._statistics
        return EngineReport(
            backend=self._device.backend,
            gamma=statistics.gamma,
            gammas=statistics.gammas(),
            waiting=len(self._queue) + self._awaiting_tasks,
            running=self._running,
            tenants=self._queue.waiting_s(),
            in_time=statistics.in_time,
            late=statistics.late,
            evicted=statistics.evicted,
            shed=statistics.shed,
            failed=statistics.failed,
            utility=round(statistics.utility, 6),
            slowdown=round(self._pace.slowdown, 3),
            decision_p99_ms=statistics.decision_p99_ms,
            p50_ms=statistics.latency_ms(0.5),
            p98_ms=statistics.latency_ms(0.98),
            earnings=earnings(self._profile, self._statistics.asked),
            slo_s=self._statistics.slo_s,
            tasks=self._tasks.names(),
        )

    def computing_s(self) -> float:
        """Seconds that the batch under way, or what it waits for, has taken; 0 when none is."""
        return 0.0 if self._computing_since is None else _now() - self._computing_since

    async def close(self) -> None:
        """Refuse what waits or is being computed."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._break(ClosedError())

    async def _serve(self) -> None:
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while work := await self._next():
                    await self._compute(*work)
        except Exception as failure:
            logger.exception("the engine is broken")
            self._break(failure)

    async def _next(self) -> tuple[Sequence[Waiting], int] | None:
        """What to compute now, with which gamma; None if nothing waits, or nothing of it can be answered in time."""
        self._computing_since = _now()
        await self._device.ready()
        self._computing_since = None
        self._drop_late()
        if self.failure is not None:
            return None
        if self._probe is not None:
            probe, self._probe = self._probe, None
            self._pace.recover()
            return [probe], self._pace.fastest(probe.task, self._tasks.accuracy)
        if not len(self._queue) or (step := self._decided()) is None:
            return None
        assert step.gamma is not None
        queries = tuple(step.queries)
        self._queue.take(step.batch, queries, self._pace.foreseen_s(step.gamma, len(queries)) / len(queries))
        return queries, step.gamma

    def _decided(self) -> Step[Waiting] | None:
        """What the policy runs once it has decided, which takes time itself; if that is too late, what it would now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._stands(ahead):
            return ahead
        started = _now()
        step = self._planned(started + self._statistics.decision_s) or self._planned(started)
        if step is None and self._pace.slowdown > 1 and self._pace.in_doubt(started):
            self._pace.recover()
            step = self._planned(started)
        self._statistics.decided(_now() - started)
        return step

    def _decide_ahead(self, end: float) -> None:
        """Choose what runs after the batch that ends at about `end`: the device need not wait for the choice."""
        if len(self._queue):
            started = _now()
            self._ahead = self._planned(max(end, started + self._statistics.decision_s))
            self._statistics.decided(_now() - started)

    def _stands(self, ahead: Step[Waiting]) -> bool:
        """Whether all that was chosen earlier still waits, and would be in time."""
        assert ahead.gamma is not None
        end = _now() + self._pace.foreseen_s(ahead.gamma, len(ahead.queries))
        return all(not query.reply.done() and end <= query.deadline for query in ahead.queries)

    def _planned(self, now: float) -> Step[Waiting] | None:
        """What the policy runs first of the batches with images of the tenant whose turn it is.

        Images of others that are in the same batch run with them. A tenant of which nothing can run lets others go.
        """
        for tenant, batches in self._queue.turns():
            plan = self._policy.plan(batches, now)
            if step := next((step for step in plan if step.gamma is not None and step.queries), None):
                return self._shortened(step, self._longest.seconds(tenant, now))
        return None

    def _shortened(self, step: Step[Waiting], most_s: float) -> Step[Waiting]:
        """`step` with as many of its images, one at least, as take `most_s`."""
        assert step.gamma is not None
        rows = len(step.queries)
        while rows > 1 and self._pace.foreseen_s(step.gamma, rows) > most_s:
            rows -= 1
        return step._replace(queries=step.queries[:rows])

    def _is_probe(self, deadline: float) -> bool:
        """Whether a query that is too late by the profile is to be tried all the same: nothing else is."""
        idle = not self._running and self._probe is None
        return idle and self._pace.in_doubt(_now()) and _now() < deadline

    async def _compute(self, queries: Sequence[Waiting], gamma: int) -> None:
        self._running = len(queries)
        self._computing_since = started = _now()
        images, tasks = [query.image for query in queries], [query.task for query in queries]
        foreseen_s = self._pace.foreseen_s(gamma, len(queries))
        lead_s = min(_LEAD * self._statistics.decision_s, foreseen_s / 2)
        end = started + foreseen_s
        self._stalls_at = started + max(_LEAST_PATIENCE_S, _PATIENCE * foreseen_s)
        deciding = asyncio.get_running_loop().call_at(end - lead_s, self._decide_ahead, end)
        try:
            logits = await self._device.run(images, tasks, gamma)
            if len(logits) != len(queries):
                raise RuntimeError(f"the device answered {len(logits)} of {len(queries)} images")
            self._answer(queries, logits, gamma, started)
            self._broken = 0
            more_s = (_now() - started - foreseen_s) / len(queries)
            for query in queries:
                self._queue.charge(query.tenant, more_s)
        except asyncio.CancelledError:
            for query in queries:
                query.settle(_broken_down(ClosedError()))
            raise
        except Exception as failure:
            self._fail(queries, gamma, failure)
        finally:
            deciding.cancel()
            self._running, self._computing_since, self._stalls_at = 0, None, math.inf

    def _answer(
        self, queries: Sequence[Waiting], logits: Sequence[NDArray[np.float32]], gamma: int, started: float
    ) -> None:
        now = _now()
        self._pace.computed(gamma, len(queries), now - started, now)
        self._statistics.computed(gamma, len(queries), now - started)
        for query, row in zip(queries, logits, strict=True):
            in_time = now <= query.deadline
            fate: Fate = "in_time" if in_time else "late"
            answer = Answer(row.astype("<f4").tobytes(), gamma, fate, len(queries), now - started)
            if query.settle(answer):
                accuracy = self._tasks.accuracy(query.task, gamma) or 0.0
                self._statistics.answered(now - query.arrival, in_time, query.utility * accuracy * in_time)

    def _fail(self, queries: Sequence[Waiting], gamma: int, failure: Exception) -> None:
        logger.error("%d images could not be computed with gamma %d: %r", len(queries), gamma, failure)
        self._statistics.failed += sum(query.settle(_broken_down(failure)) for query in queries)
        self._broken += 1
        if self._broken >= _MOST_BROKEN:
            self._break(failure)

    def _break(self, failure: Exception) -> None:
        """Compute nothing any more: another replica will."""
        self.failure = failure
        if self._probe is not None:
            self._probe.settle(_broken_down(failure))
        for batch in self._queue.batches:
            for query in batch.queries:
                self._queue.remove(query)
                query.settle(_broken_down(failure))

    def _drop_late(self) -> None:
        """Evict what could not be answered in time any more even if it ran now, alone and fast (type 4).

        Behind a batch that stalls it is not load that makes it late, and another replica may answer it.
        """
        now = _now()
        for query in self._queue.drop_late(now + self._pace.soonest_s):
            if self._is_probe(query.deadline):
                self._probe = query
                self._changed.set()
                continue
            if now > self._stalls_at:
                self._statistics.failed += 1
                query.settle(Refusal("failed", f"one batch has taken {self.computing_s():.1f} s"))
                continue
            self._statistics.evicted += 1
            waited_ms = (now - query.arrival) * 1e3
            reason = f"after waiting for {waited_ms:.0f} ms it could not be answered before its deadline any more"
            query.settle(Refusal("final", reason, _RETRY_S, Outcome.SHED, Fault.EVICTED))
        self._watch()

    def _watch(self) -> None:
        """See to it that queries are evicted in time, however long the batch that is being computed takes."""
        if self._expiry is not None:
            self._expiry.cancel()
        deadline = min((batch.deadline for batch in self._queue.batches), default=math.inf)
        if deadline < math.inf:
            when = max(deadline - self._pace.soonest_s, _now()) + _EVICTION_LAG_S
            self._expiry = asyncio.get_running_loop().call_at(when, self._drop_late)

    def _shed(self) -> Refusal:
        self._statistics.shed += 1
        reason = f"the queue is full: {self._limit} images wait that came earlier, are worth more, or are others' due"
        return Refusal("busy", reason, _RETRY_S, Outcome.SHED)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _broken_down(failure: Exception) -> Refusal:
    return Refusal("failed", f"the computation broke down: {type(failure).__name__}")
