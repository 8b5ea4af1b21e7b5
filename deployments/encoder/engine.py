"""One replica's queue and executor: holds a runtime of one max_length, answers what fits, refuses the rest (Arlo §3.1).

Plain asyncio, without Ray: the Serve shell is `replica.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from pliant.deployments.encoder.messages import MOST_WAITING, Answer, Query, Report
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Refusal
from pliant.errors import PliantError
from pliant.formats.profile import Profile
from pliant.policies.cluster.fair_share import FairShare
from pliant.policies.encoder.admission import retry_after
from pliant.policies.encoder.service_curve import ServiceCurve, ServiceTimes, lengths_to_measure

_RECENT_LATENCIES = 512
_MEASURED_CALLS = 5
_FULL_RETRY_S = 1.0


class Runtime(Protocol):
    """A model compiled for one max_length, as `pliant.kernels.encoder.compiled_classifier.load` returns it."""

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
        self, ids: np.ndarray | Sequence[int], wanted: Callable[[np.ndarray], bool]
    ) -> WithImportance: ...


class Runtimes(Protocol):
    """Where an engine gets its runtimes from. All methods block; they run in threads."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The max_lengths that replicas may hold, in rising order."""

    @property
    def profile(self) -> Profile | None:
        """From which they follow, if they do, once it is measured."""

    @property
    def device(self) -> str:
        """What the runtimes compute on, as far as their latency depends on it."""

    def load(self, max_length: int) -> Runtime:
        """The fastest there is by now; at once, so that it is the uncompiled model where nothing else is."""


class LoadError(PliantError):
    """A runtime could not be loaded; the replica holds what it held before."""


class _CrowdedOutError(Exception):
    """It made way for another tenant's work."""


class _Computation(NamedTuple):
    logits: np.ndarray
    importance: np.ndarray | None
    importance_s: float
    seconds: float
    """Those for importance included."""


@dataclass(eq=False)
class _Waiting:
    """A text that waits to be computed on `runtime`."""

    query: Query
    runtime: Runtime
    expected_s: float
    computed: Future[_Computation] = field(default_factory=Future)


class Engine:
    """Runs one request at a time on the runtime it holds: those of one tenant in order of arrival, and tenants in turn.

    Runtimes are loaded and measured in the worker thread, so the event loop never blocks. The queue is bounded by the
    requests' budgets, and by `limit`.
    """

    def __init__(self, runtimes: Runtimes, limit: int = MOST_WAITING) -> None:
        self._runtimes = runtimes
        self._limit = limit
        self._share: FairShare[_Waiting] = FairShare()
        """In seconds of computing. The worker takes from it while the event loop adds, under `_lock`."""
        self._lock = threading.Lock()
        self._measured: dict[tuple[int, str], dict[int, float]] = {}
        """Length and backend -> seconds of a call by tokens."""
        self._failed: dict[int, str] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="runtime")
        self._switching = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runtime: Runtime | None = None
        self._version = 0
        self._times: ServiceTimes | None = None
        """Of what it holds."""
        self._outstanding = 0
        self._queued_s = 0.0
        """Expected of these."""
        self._computed = 0
        self._computing_since: float | None = None
        self.failure: Exception | None = None
        """Why it holds no runtime at all; until it does, all requests are refused."""
        self.compiling: set[int] = set()
        """Lengths of which a compiled runtime is yet to come."""
        self.uncompiled: dict[int, str] = {}
        """Lengths that stay so, and why."""
        self.uses: Counter[int] = Counter()
        """Answers by the max_length of the runtime that computed them."""
        self._latencies: deque[float] = deque(maxlen=_RECENT_LATENCIES)

    @property
    def held(self) -> Runtime | None:
        """What it computes on; None while it switches."""
        return self._runtime

    async def renew(self) -> None:
        """Load what is held once more, as a faster one may be there now, while requests are answered as before."""
        async with self._switching:
            if self._runtime is None:
                return
            self._compute_on(*await asyncio.to_thread(self._load, self._runtime.max_length))

    async def hold(self, max_length: int) -> Report:
        """Switch to the runtime of `max_length`: refuse new requests, finish the accepted ones, load.

        Raises LoadError when it cannot be loaded. What was held before is then held again; only when that fails too, or
        nothing was held, `failure` is set. Once begun it goes on, even if its caller is cancelled.
        """
        return await asyncio.shield(asyncio.ensure_future(self._hold(max_length)))

    async def _hold(self, max_length: int) -> Report:
        async with self._switching:
            held = self._runtime.max_length if self._runtime else None
            if held != max_length:
                self._runtime = None
                self._version += 1
                await self._idle.wait()
                try:
                    await self._switch(max_length)
                except Exception as failure:
                    error = self._quarantined(max_length, failure)
                    await self._restore(held, error)
                    raise error from failure
            return self.report()

    async def _restore(self, held: int | None, error: LoadError) -> None:
        if held is None:
            self.failure = error
            return
        try:
            await self._switch(held)
        except Exception:
            self.failure = error

    async def _switch(self, max_length: int) -> None:
        self._compute_on(*await asyncio.get_running_loop().run_in_executor(self._worker, self._load, max_length))
        self._failed.pop(max_length, None)
        self.failure = None

    def _compute_on(self, runtime: Runtime, measured: Mapping[int, float]) -> None:
        """From now on; `measured` is what calls take, by tokens."""
        self._times = ServiceTimes(measured)
        self._runtime = runtime
        self._version += 1

    def _load(self, max_length: int) -> tuple[Runtime, Mapping[int, float]]:
        runtime = self._runtimes.load(max_length)
        known = (max_length, runtime.backend)
        if known not in self._measured:
            self._measured[known] = _measure(runtime)
        return runtime, self._measured[known]

    def _quarantined(self, max_length: int, failure: Exception) -> LoadError:
        reason = str(failure) if isinstance(failure, PliantError) else f"{type(failure).__name__}: {failure}"
        self._failed[max_length] = reason
        return LoadError(f"{max_length} tokens: {reason}")

    async def infer(self, query: Query) -> Answer | Refusal:
        """Answer `query`, or refuse it at once when it does not fit this runtime or cannot meet its budget.

        Raises what the runtime does.
        """
        runtime, times = self._runtime, self._times
        if runtime is None or times is None or query.length > runtime.max_length:
            return Refusal("moved", "it does not hold a runtime for this length", report=self.report())
        curve = times.curve(time.monotonic())
        expected_s = curve.seconds(query.length)
        if wait_s := self._must_wait_s(curve, query):
            return Refusal("busy", "its queue is too long for the deadline", wait_s, Outcome.SHED, report=self.report())
        waiting = _Waiting(query, runtime, expected_s)
        if not self._has_room(waiting):
            return self._full()
        arrived = time.perf_counter()
        self._outstanding += 1
        self._queued_s += expected_s
        self._idle.clear()
        try:
            asyncio.get_running_loop().run_in_executor(self._worker, self._compute_next)
            computation = await asyncio.wrap_future(waiting.computed)
        except _CrowdedOutError:
            return self._full()
        finally:
            with self._lock:
                self._share.remove(waiting)
            self._outstanding -= 1
            self._queued_s = self._queued_s - expected_s if self._outstanding else 0.0
            if not self._outstanding:
                self._idle.set()
        times.observe(time.monotonic(), query.length, computation.seconds - computation.importance_s)
        self.uses[runtime.max_length] += 1
        self._latencies.append(time.perf_counter() - arrived)
        computed = query.length if runtime.dynamic else runtime.max_length
        self._computed += computed
        return Answer(
            logits=computation.logits.tobytes(),
            max_length=runtime.max_length,
            computed=computed,
            importance=b"" if computation.importance is None else computation.importance.tobytes(),
            importance_s=computation.importance_s,
            compute_s=computation.seconds - computation.importance_s,
        )

    def report(self) -> Report:
        recent = sorted(self._latencies)
        curve = self._times.curve(time.monotonic()).points if self._runtime and self._times else ()
        return Report(
            version=self._version,
            max_length=self._runtime.max_length if self._runtime else 0,
            held={},
            service_s=curve[-1][1] if curve else 0.0,
            curve=curve,
            backend=self._runtime.backend if self._runtime else "",
            device=self._runtimes.device,
            compiling=sorted(self.compiling),
            uncompiled=dict(self.uncompiled),
            failed=dict(self._failed),
            waiting=self._outstanding,
            tenants=self._waiting_s(),
            served=self.uses.total(),
            computed_tokens=self._computed,
            p50_ms=round(recent[len(recent) // 2] * 1e3, 2) if recent else 0.0,
            p98_ms=round(recent[int(len(recent) * 0.98)] * 1e3, 2) if recent else 0.0,
        )

    def computing_s(self) -> float:
        """Seconds that the computation under way has taken; 0 when none is."""
        since = self._computing_since
        return 0.0 if since is None else time.perf_counter() - since

    def seconds(self, query: Query) -> float:
        """That `query` should take here, without waiting; 0 if nobody knows."""
        return self._times.curve(time.monotonic()).seconds(query.length) if self._times else 0.0

    def _must_wait_s(self, curve: ServiceCurve, query: Query) -> float:
        """Seconds until `query` could be admitted; 0 when it can be now."""
        if query.budget_s is None:
            return 0.0
        expected_s, idle_s = curve.seconds(query.length), curve.idle_seconds(query.length)
        return retry_after(self._ahead_s(query), expected_s, idle_s, query.budget_s, query.slack_share)

    def _ahead_s(self, query: Query) -> float:
        """Of work before `query`, if it came now: less than there is where other tenants are over their shares."""
        with self._lock:
            waiting = self._share.waiting()
            if waiting.keys() <= {query.tenant.name}:
                return self._queued_s
            ahead_s = self._share.cost(self._share.ahead(*query.tenant))
        return max(0.0, self._queued_s - sum(waiting.values())) + ahead_s

    def _waiting_s(self) -> dict[str, float]:
        with self._lock:
            return {tenant: round(seconds, 6) for tenant, seconds in self._share.waiting().items()}

    def _has_room(self, waiting: _Waiting) -> bool:
        """Have it wait, if need be in the place of what came last of a tenant that is further over its share."""
        tenant, expected_s = waiting.query.tenant, waiting.expected_s
        with self._lock:
            if len(self._share) >= self._limit:
                loser = self._share.furthest_over(*tenant, expected_s)
                if loser == tenant.name:
                    return False
                crowded_out = next(self._share.newest(loser))
                self._share.remove(crowded_out)
                if crowded_out.computed.set_running_or_notify_cancel():
                    crowded_out.computed.set_exception(_CrowdedOutError())
            self._share.add(waiting, *tenant, expected_s)
        return True

    def _full(self) -> Refusal:
        reason = f"its queue is full: {self._limit} texts wait, and this client has more than its share of them"
        return Refusal("busy", reason, _FULL_RETRY_S, Outcome.SHED, report=self.report())

    def _compute_next(self) -> None:
        """In the worker: what is next by now, if anything is; it is called once for each text."""
        with self._lock:
            if not (found := self._share.ranked()):
                return
            [waiting] = found
            self._share.take(waiting)
        if not waiting.computed.set_running_or_notify_cancel():
            return
        try:
            computation = self._compute(waiting.runtime, waiting.query)
        except Exception as failure:
            waiting.computed.set_exception(failure)
        else:
            with self._lock:
                self._share.charge(*waiting.query.tenant, computation.seconds - waiting.expected_s)
            waiting.computed.set_result(computation)

    def _compute(self, runtime: Runtime, query: Query) -> _Computation:
        ids = np.frombuffer(query.ids, dtype="<i4")
        types = np.frombuffer(query.types, dtype="u1") if query.types else None
        importance, importance_s = None, 0.0
        self._computing_since = started = time.perf_counter()
        try:
            if query.importance_request and isinstance(runtime, ImportanceRuntime):
                told = runtime.with_importance(ids, query.importance_request.wants)
                logits, importance, importance_s = told.logits, told.importance, told.importance_s
            else:
                logits = runtime(ids, types)
        finally:
            self._computing_since = None
        return _Computation(logits, importance, importance_s, time.perf_counter() - started)


def _measure(runtime: Runtime) -> dict[int, float]:
    """Seconds of a call by tokens, at the lengths that say most: the median of a few, after one to warm up."""
    runtime(np.ones(runtime.max_length, dtype=np.int64))
    return {
        length: _seconds(runtime, np.ones(length, dtype=np.int64))
        for length in lengths_to_measure(runtime.max_length, runtime.dynamic)
    }


def _seconds(runtime: Runtime, ids: np.ndarray) -> float:
    seconds = []
    for _ in range(_MEASURED_CALLS):
        started = time.perf_counter()
        runtime(ids)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
