"""One replica's engine: holds a runtime, answers what fits it and has time, refuses the rest (Arlo §3.1).

Plain asyncio, without Ray: the Serve shell is `replica.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict, deque
from typing import Protocol

import numpy as np

from pliant.deployments.encoder.computing import BatchRuntime, CrowdedOutError, Held, Runtime, Waiting, Worker
from pliant.deployments.encoder.messages import MOST_WAITING, Answer, Query, Report
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Refusal
from pliant.errors import PliantError
from pliant.formats.profile import Profile
from pliant.policies.cluster.margin import Margin
from pliant.policies.encoder.admission import retry_after
from pliant.policies.encoder.service_curve import ServiceCurve, lengths_to_measure

_RECENT_LATENCIES = 512
_MEASURED_CALLS = 5
_FULL_RETRY_S = 1.0


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

    @property
    def resident(self) -> bool:
        """Whether each runtime takes all lengths, so that a replica need not load another one for another length."""

    @property
    def reason(self) -> str:
        """Why they are of the kind that they are, for people."""

    def load(self, max_length: int) -> Runtime:
        """The fastest there is by now; at once, so that it is the uncompiled model where nothing else is."""


class LoadError(PliantError):
    """A runtime could not be loaded; the replica holds what it held before."""


class Engine:
    """Answers requests on the runtime it holds, one at a time or in batches: see `computing.Worker`.

    Its *home* is the length of the texts that it is to have first: the max_length of its runtime, or, where that takes
    all lengths, any of them. Runtimes are loaded and measured in threads, so the event loop never blocks. The queue is
    bounded by the requests' budgets, and by `limit`.
    """

    def __init__(self, runtimes: Runtimes, limit: int = MOST_WAITING) -> None:
        self._runtimes = runtimes
        self._limit = limit
        self._worker = Worker(limit)
        self._measured: dict[tuple[int, str], dict[int, float]] = {}
        """Length and backend -> seconds of a call by tokens."""
        self._failed: dict[int, str] = {}
        self._switching = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held: Held | None = None
        self._home = 0
        self._version = 0
        self._outstanding = 0
        self._queued_s = 0.0
        """Expected of these."""
        self._margins: defaultdict[str, Margin] = defaultdict(Margin)
        """By tenant, as others pass one that is over its share, and its waits are foreseen badly."""
        self._computed = 0
        self.failure: Exception | None = None
        """Why it holds no runtime at all; until it does, all requests are refused."""
        self.compiling: set[int] = set()
        """Lengths of which a compiled runtime is yet to come."""
        self.uncompiled: dict[int, str] = {}
        """Lengths that stay so, and why."""
        self.uses: Counter[int] = Counter()
        """Answers by the home at which they were given."""
        self._layers: Counter[int] = Counter()
        """Answers by the layers that were computed for them, where texts leave early."""
        self._latencies: deque[float] = deque(maxlen=_RECENT_LATENCIES)

    @property
    def held(self) -> Runtime | None:
        """What it computes on; None while it switches."""
        return self._held.runtime if self._held else None

    @property
    def home(self) -> int:
        """The length that it was last asked to hold; 0 before that."""
        return self._home

    async def renew(self) -> None:
        """Load what is held once more, as a faster one may be there now, while requests are answered as before."""
        async with self._switching:
            if self._held is not None:
                self._compute_on(await asyncio.to_thread(self._load, self._home), self._home)

    async def hold(self, length: int) -> Report:
        """Be at home at `length`: refuse new requests, finish the accepted ones, load; or, where its runtime takes all
        lengths, do no more than say so.

        Raises LoadError when it cannot be loaded. What was held before is then held again; only when that fails too, or
        nothing was held, `failure` is set. Once begun it goes on, even if its caller is cancelled.
        """
        return await asyncio.shield(asyncio.ensure_future(self._hold(length)))

    async def _hold(self, length: int) -> Report:
        async with self._switching:
            held, home = self._held, self._home
            if held and self._runtimes.resident and held.runtime.max_length >= length:
                self._compute_on(held, length)
            elif held is None or home != length:
                self._held = None
                self._version += 1
                await self._idle.wait()
                try:
                    await self._switch(length)
                except Exception as failure:
                    error = self._quarantined(length, failure)
                    await self._restore(home if held else None, error)
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

    async def _switch(self, length: int) -> None:
        self._compute_on(await self._worker.idly(lambda: self._load(length)), length)
        self._failed.pop(length, None)
        self.failure = None

    def _compute_on(self, held: Held, home: int) -> None:
        """From now on."""
        if (held, home) != (self._held, self._home):
            self._held, self._home = held, home
            self._version += 1

    def _load(self, length: int) -> Held:
        runtime = self._runtimes.load(length)
        if isinstance(runtime, BatchRuntime) and runtime.times:
            return Held(runtime, dict(zip(runtime.times.lengths, runtime.times.seconds[0], strict=True)))
        known = (runtime.max_length, runtime.backend)
        if known not in self._measured:
            self._measured[known] = _measure(runtime)
        return Held(runtime, self._measured[known])

    def _quarantined(self, max_length: int, failure: Exception) -> LoadError:
        reason = str(failure) if isinstance(failure, PliantError) else f"{type(failure).__name__}: {failure}"
        self._failed[max_length] = reason
        return LoadError(f"{max_length} tokens: {reason}")

    async def infer(self, query: Query) -> Answer | Refusal:
        """Answer `query`, or refuse it at once when it does not fit this runtime or cannot meet its budget.

        Raises what the runtime does.
        """
        held = self._held
        if held is None or query.length > held.runtime.max_length:
            return Refusal("moved", "it does not hold a runtime for this length", report=self.report())
        curve = held.times.curve(time.monotonic())
        ahead_s = self._worker.ahead_s(query, self._queued_s)
        if wait_s := self._must_wait_s(curve, query, ahead_s):
            return Refusal("busy", "its queue is too long for the deadline", wait_s, Outcome.SHED, report=self.report())
        waiting = Waiting(query, held, curve.work_seconds(query.length), time.monotonic())
        if not self._worker.add(waiting):
            return self._full()
        home = self._home
        self._outstanding += 1
        self._queued_s += waiting.work_s
        self._idle.clear()
        try:
            computation = await waiting.answered
        except CrowdedOutError:
            return self._full()
        finally:
            self._worker.remove(waiting)
            self._outstanding -= 1
            self._queued_s = self._queued_s - waiting.work_s if self._outstanding else 0.0
            if not self._outstanding:
                self._idle.set()
        runtime = held.runtime
        self.uses[home] += 1
        if computation.layers is not None:
            self._layers[computation.layers] += 1
        latency_s = time.monotonic() - waiting.arrived
        self._latencies.append(latency_s)
        if query.budget_s:
            predicted_s = ahead_s + curve.seconds(query.length) + computation.importance_s
            self._margins[query.tenant.name].observe(predicted_s, latency_s, query.budget_s)
        computed = query.length if runtime.dynamic else runtime.max_length
        self._computed += computed
        return Answer(
            logits=computation.logits.tobytes(),
            max_length=runtime.max_length,
            computed=computed,
            importance=b"" if computation.importance is None else computation.importance.tobytes(),
            importance_s=computation.importance_s,
            compute_s=computation.seconds,
            earlier=b"".join(row.tobytes() for row in computation.earlier),
            earlier_s=tuple(computation.earlier_s),
        )

    def report(self) -> Report:
        recent = sorted(self._latencies)
        held = self._held
        expected = held.times.curve(time.monotonic()) if held else None
        curve = expected.points if expected else ()
        return Report(
            version=self._version,
            max_length=held.runtime.max_length if held else 0,
            home=self._home if held else 0,
            held={},
            service_s=curve[-1][1] if curve else 0.0,
            curve=curve,
            shares=expected.shares if expected else (),
            backend=held.runtime.backend if held else "",
            device=self._runtimes.device,
            resident=self._runtimes.resident,
            reason=self._runtimes.reason,
            compiling=sorted(self.compiling),
            uncompiled=dict(self.uncompiled),
            failed=dict(self._failed),
            waiting=self._outstanding,
            tenants=self._worker.waiting_s(),
            margins={tenant: round(margin.value, 2) for tenant, margin in self._margins.items()},
            served=self.uses.total(),
            passes=self._worker.passes,
            computed_tokens=self._computed,
            layers=dict(self._layers),
            p50_ms=round(recent[len(recent) // 2] * 1e3, 2) if recent else 0.0,
            p98_ms=round(recent[int(len(recent) * 0.98)] * 1e3, 2) if recent else 0.0,
        )

    def computing_s(self) -> float:
        """Seconds that the computation under way has taken; 0 when none is."""
        return self._worker.computing_s()

    def seconds(self, query: Query) -> float:
        """By which `query` should hold up others here; 0 if nobody knows."""
        held = self._held
        return held.times.curve(time.monotonic()).work_seconds(query.length) if held else 0.0

    def _must_wait_s(self, curve: ServiceCurve, query: Query, ahead_s: float) -> float:
        """Seconds until `query` could be admitted behind work for `ahead_s`; 0 when it can be now."""
        if query.budget_s is None:
            return 0.0
        expected_s, idle_s = curve.seconds(query.length), curve.idle_seconds(query.length)
        slack_share = query.slack_share / (1 + self._margins[query.tenant.name].value)
        return retry_after(ahead_s, expected_s, idle_s, query.budget_s, slack_share)

    def _full(self) -> Refusal:
        reason = f"its queue is full: {self._limit} texts wait, and this client has more than its share of them"
        return Refusal("busy", reason, _FULL_RETRY_S, Outcome.SHED, report=self.report())


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
