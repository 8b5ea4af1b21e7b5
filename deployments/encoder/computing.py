"""What waits in a replica, and the thread that computes it: one text at a time or in batches, and tenants in turn.

Plain threads and asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from pliant.deployments.encoder.messages import Query
from pliant.errors import CannotCompileError
from pliant.formats.pass_times import PassTimes
from pliant.kernels.encoder.texts import Output, Text
from pliant.policies.cluster.fair_share import FairShare
from pliant.policies.encoder.batching import Batcher, PackedTimes, shares
from pliant.policies.encoder.batching import Waiting as Queued
from pliant.policies.encoder.service_curve import ServiceCurve, ServiceTimes

_FRESH_S = 0.05
_MOST_IN_TURN = 128
"""Texts that are looked at when tenants take turns."""

T = TypeVar("T")


class Runtime(Protocol):
    """A model ready for texts of up to max_length, as `pliant.kernels.encoder.compiled_classifier.load` returns it."""

    max_length: int
    dynamic: bool
    """Computes each text at its own length, instead of padding it to max_length."""
    backend: str

    def __call__(
        self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None
    ) -> np.ndarray: ...


class WithImportance(Protocol):
    """What a runtime says of one text and its tokens."""

    @property
    def logits(self) -> np.ndarray: ...

    @property
    def importance(self) -> np.ndarray | None:
        """float32 [tokens]: the attention that each token received; None if it was not wanted."""

    @property
    def importance_s(self) -> float:
        """Seconds that importance took beyond the logits."""


@runtime_checkable
class ImportanceRuntime(Runtime, Protocol):
    """One that also gives the importance of tokens: see `pliant.kernels.encoder.importance_classifier`."""

    def with_importance(
        self,
        ids: np.ndarray | Sequence[int],
        types: np.ndarray | Sequence[int] | None,
        wanted: Callable[[np.ndarray], bool],
    ) -> WithImportance: ...


@runtime_checkable
class BatchRuntime(Runtime, Protocol):
    """One that answers several texts in a pass, and gives the importance of tokens if that is wanted."""

    times: PassTimes | None
    """What passes were measured to take; until they are (None), each text has a pass of its own."""

    def run_all(self, texts: Sequence[Text], *, importance: bool = False) -> Sequence[Output]: ...


class CrowdedOutError(Exception):
    """It made way for another tenant's work."""


class Computation(NamedTuple):
    """What was found out about one text."""

    logits: np.ndarray
    importance: np.ndarray | None
    importance_s: float
    seconds: float
    """Of the pass that it was computed in, its share; those for importance left out."""
    layers: int | None = None
    """How many were computed of it, where texts leave early."""
    earlier: Sequence[np.ndarray] = ()
    """The logits of those of the query's stops that it went past."""
    earlier_s: Sequence[float] = ()
    """Of `seconds`, those up to each of these."""


class Held:
    """A runtime, and what texts take on it; `measured` are the seconds of one alone, by tokens."""

    def __init__(self, runtime: Runtime, measured: Mapping[int, float]) -> None:
        self.runtime = runtime
        self.batcher: Batcher | None = None
        self._batch_times: PackedTimes | None = None
        together = None
        if isinstance(runtime, BatchRuntime) and runtime.times:
            times = self._batch_times = PackedTimes.fitted(runtime.times)
            self.batcher = Batcher(times, runtime.max_length)
            together = shares(times, measured)
        self.times = ServiceTimes(measured, together)
        self._curve, self._made = self.times.curve(0.0), -math.inf

    def curve(self, now: float) -> ServiceCurve:
        """What to expect; as it was up to `_FRESH_S` ago, since to make one takes longer than all else of a query."""
        if now - self._made > _FRESH_S:
            self._curve, self._made = self.times.curve(now), now
        return self._curve

    def observe(self, now: float, lengths: Sequence[int], seconds: float) -> None:
        """A pass over texts of these lengths took `seconds`."""
        longest = max(lengths)
        if self._batch_times is not None and len(lengths) > 1:
            expected_s = self._batch_times.seconds(sorted(lengths))[-1]
            seconds *= self._batch_times.seconds((longest,))[0] / expected_s
        self.times.observe(now, longest, seconds)


@dataclass(eq=False)
class Waiting:
    """A text that waits to be computed on what was `held` when it came."""

    query: Query
    held: Held
    work_s: float
    arrived: float
    answered: asyncio.Future[Computation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def deadline(self) -> float:
        """One that is late already is wanted at once."""
        return self.arrived + (self.query.budget_s or 0.0)


class Worker:
    """The thread, and the queue that it takes from while the event loop adds to it; at most `limit` texts wait.

    Without competition, those that wait are cut into batches by their deadlines and what batches take (see
    `policies.encoder.batching`). Where several tenants have texts waiting, the one whose turn it is gets a batch, which
    the others' texts fill up. What is computed by is `held` when a text comes, so that another may be loaded meanwhile.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._share: FairShare[Waiting] = FairShare()
        """In seconds of computing."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runtime")
        self._running = False
        """Whether the thread will look for texts again."""
        self._since: float | None = None
        self.passes = 0

    def add(self, waiting: Waiting) -> bool:
        """Have it wait, if need be in the place of what came last of a tenant that is further over its share."""
        tenant, work_s = waiting.query.tenant, waiting.work_s
        with self._lock:
            if len(self._share) >= self._limit:
                loser = self._share.furthest_over(*tenant, work_s)
                if loser == tenant.name:
                    return False
                crowded_out = next(self._share.newest(loser))
                self._share.remove(crowded_out)
                if not crowded_out.answered.done():
                    crowded_out.answered.set_exception(CrowdedOutError())
            self._share.add(waiting, *tenant, work_s)
            running, self._running = self._running, True
        if not running:
            loop = asyncio.get_running_loop()
            loop.run_in_executor(self._thread, self._run, loop)
        return True

    def remove(self, waiting: Waiting) -> None:
        """Nobody wants it any more; ignored if it is computed already."""
        with self._lock:
            self._share.remove(waiting)

    async def idly(self, function: Callable[[], T]) -> T:
        """Run it in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def ahead_s(self, query: Query, queued_s: float) -> float:
        """Of `queued_s`, all there is to do, what would be done before `query`: less where others are over shares."""
        with self._lock:
            waiting = self._share.waiting()
            if waiting.keys() <= {query.tenant.name}:
                return queued_s
            ahead_s = self._share.cost(self._share.ahead(*query.tenant))
        return max(0.0, queued_s - sum(waiting.values())) + ahead_s

    def waiting_s(self) -> dict[str, float]:
        """Seconds of work that wait, by tenant."""
        with self._lock:
            return {tenant: round(seconds, 6) for tenant, seconds in self._share.waiting().items()}

    def computing_s(self) -> float:
        """Seconds that the computation under way has taken; 0 when none is."""
        since = self._since
        return 0.0 if since is None else time.perf_counter() - since

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread: compute until nothing waits."""
        while batch := self._next():
            self._answer(batch, loop)

    def _next(self) -> list[Waiting]:
        """What to compute now; none if nothing waits."""
        with self._lock:
            batch = self._chosen()
            for waiting in batch:
                self._share.take(waiting)
            self._running = bool(batch)
        return batch

    def _chosen(self) -> list[Waiting]:
        contended = self._share.contended
        if not len(self._share):
            return []
        first, *others = self._share.ranked(_MOST_IN_TURN)
        batcher = first.held.batcher
        if batcher is None or not others:
            return [first]
        among = [first, *(each for each in others if each.held is first.held)]
        queue = [Queued(each.query.length, each.arrived, each.deadline) for each in among]
        batch = batcher.batch_with(0, queue) if contended else batcher.next_batch(time.monotonic(), queue)
        return [among[place] for place in batch.texts]

    def _answer(self, batch: Sequence[Waiting], loop: asyncio.AbstractEventLoop) -> None:
        """A text that cannot be computed fails no other one."""
        try:
            found = self._compute(batch)
        except Exception as failure:
            if len(batch) == 1:
                loop.call_soon_threadsafe(_fail, batch[0], failure)
                return
            for waiting in batch:
                self._answer([waiting], loop)
        else:
            loop.call_soon_threadsafe(_answer, batch, found)

    def _compute(self, batch: Sequence[Waiting]) -> list[Computation]:
        self._since = started = time.perf_counter()
        try:
            found = compute(batch[0].held.runtime, [waiting.query for waiting in batch])
        finally:
            self._since = None
        self.passes += 1
        share = (time.perf_counter() - started) / sum(waiting.work_s for waiting in batch)
        with self._lock:
            for waiting in batch:
                self._share.charge(*waiting.query.tenant, (share - 1) * waiting.work_s)
        return found


def compute(runtime: Runtime, queries: Sequence[Query]) -> list[Computation]:
    """What `runtime` says of each; of several only if it is a `BatchRuntime`, as for a query with stops."""
    if isinstance(runtime, BatchRuntime):
        return _compute_together(runtime, queries)
    [query] = queries
    if query.stops:
        raise CannotCompileError(f"{runtime.backend} computes all layers of a text, so that it cannot leave early")
    ids, types, _ = _text(query)
    started = time.perf_counter()
    if query.importance_request and isinstance(runtime, ImportanceRuntime):
        output = runtime.with_importance(ids, types, query.importance_request.wants)
        seconds = time.perf_counter() - started - output.importance_s
        return [Computation(output.logits, output.importance, output.importance_s, seconds)]
    logits = runtime(ids, types)
    return [Computation(logits, None, 0.0, time.perf_counter() - started)]


def _compute_together(runtime: BatchRuntime, queries: Sequence[Query]) -> list[Computation]:
    """In one pass, and another one for importance, of those whose answer asks for it."""
    texts = [_text(query) for query in queries]
    started = time.perf_counter()
    answers = runtime.run_all(texts)
    pass_s = time.perf_counter() - started
    tokens = sum(query.length for query in queries)
    wanted = [
        place
        for place, (query, answer) in enumerate(zip(queries, answers, strict=True))
        if query.importance_request and query.importance_request.wants(answer.logits)
    ]
    started = time.perf_counter()
    outputs = runtime.run_all([texts[place] for place in wanted], importance=True) if wanted else []
    importance_s = (time.perf_counter() - started) / max(1, len(wanted))
    importance = {place: output.importance for place, output in zip(wanted, outputs, strict=True)}
    return [
        Computation(
            answer.logits,
            importance.get(place),
            importance_s * (place in importance),
            pass_s * query.length / tokens,
            answer.layers,
            answer.earlier if query.stops else (),
            tuple(seconds * query.length / tokens for seconds in answer.earlier_s) if query.stops else (),
        )
        for place, (query, answer) in enumerate(zip(queries, answers, strict=True))
    ]


def _text(query: Query) -> Text:
    types = np.frombuffer(query.types, dtype="u1") if query.types else None
    return Text(np.frombuffer(query.ids, dtype="<i4"), types, query.stops)


def _answer(batch: Sequence[Waiting], found: Sequence[Computation]) -> None:
    """In the event loop."""
    held = batch[0].held
    seconds = sum(computation.seconds for computation in found)
    held.observe(time.monotonic(), [waiting.query.length for waiting in batch], seconds)
    for waiting, computation in zip(batch, found, strict=True):
        if not waiting.answered.done():
            waiting.answered.set_result(computation)


def _fail(waiting: Waiting, failure: Exception) -> None:
    """In the event loop."""
    if not waiting.answered.done():
        waiting.answered.set_exception(failure)
