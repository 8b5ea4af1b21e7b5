"""One replica's engine: holds runtimes, answers what fits it and has time, refuses the rest (Arlo §3.1).

Plain asyncio, without Ray: the Serve shell is `replica.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
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


class Memory(Protocol):
    """In which runtimes lie."""

    @property
    def room_mb(self) -> float:
        """What they may take together."""

    def used_mb(self) -> float:
        """What is taken now, by others as well."""


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
    def memory(self) -> Memory | None:
        """What several may share; None where an engine holds one."""

    @property
    def reason(self) -> str:
        """Why they are of the kind that they are, for people."""

    def load(self, max_length: int) -> Runtime:
        """The fastest there is by now; at once, so that it is the uncompiled model where nothing else is."""


class LoadError(PliantError):
    """A runtime could not be loaded; the replica holds what it held before."""


class Engine:
    """Answers requests on the shortest runtime it holds that they fit into, one at a time or in batches: see
    `computing.Worker`.

    Its *home* is the length of the texts that it is to have first: the max_length of one of its runtimes, or, where
    that takes all lengths, any of them. Runtimes are loaded and measured in threads, so the event loop never blocks.
    The queue is bounded by the requests' budgets, and by `limit`.
    """

    def __init__(self, runtimes: Runtimes, limit: int = MOST_WAITING) -> None:
        self._runtimes = runtimes
        self._limit = limit
        self._worker = Worker(limit)
        self._measured: dict[tuple[int, str], dict[int, float]] = {}
        """Length and backend -> seconds of a call by tokens."""
        self._memory_mb: dict[int, float] = {}
        """That the runtime for a length took when it was first loaded, where several share the memory."""
        self._failed: dict[int, str] = {}
        self._switching = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._held: dict[int, Held] = {}
        """By the length that was asked for, in rising order."""
        self._home = 0
        self._version = 0
        self._outstanding = 0
        self._queued_s = 0.0
        """Expected of these."""
        self._margins: defaultdict[str, Margin] = defaultdict(Margin)
        """By tenant, as others pass one that is over its share, and its waits are foreseen badly."""
        self._tokens = self._computed = 0
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
        """What it computes the longest texts on; None while it switches."""
        return self._longest.runtime if self._held else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those that it was last asked to hold; none while it switches."""
        return tuple(self._held)

    @property
    def home(self) -> int:
        """The length that it was last asked to hold; 0 before that."""
        return self._home

    async def renew(self, length: int) -> None:
        """Load the runtime for `length` once more if it is held, or that for all lengths, as a faster one may be there
        now, while requests are answered as before."""
        async with self._switching:
            resident = self._runtimes.resident
            if self._held and (resident or length in self._held):
                kept = {each: held for each, held in self._held.items() if not (resident or each == length)}
                self._measured = {known: took for known, took in self._measured.items() if known[0] != length}
                self._compute_on(await asyncio.to_thread(self._load_all, self.lengths, kept), self._home)

    async def hold(self, length: int, lengths: Sequence[int] = ()) -> Report:
        """Be at home at `length`, with the runtimes for `lengths` (none: the one for `length`): refuse new requests,
        finish the accepted ones, load what is not there; or, where nothing is to be loaded, do no more than say so.

        Raises LoadError when it cannot be loaded. What was held before is then held again; only when that fails too, or
        nothing was held, `failure` is set. Once begun it goes on, even if its caller is cancelled.
        """
        return await asyncio.shield(asyncio.ensure_future(self._hold(length, tuple(lengths) or (length,))))

    async def _hold(self, length: int, lengths: tuple[int, ...]) -> Report:
        async with self._switching:
            held, home = self._held, self._home
            takes_all = self._runtimes.resident and held and self._longest.runtime.max_length >= length
            fits = {each: held[each] for each in lengths if each in held and held[each].runtime.max_length == each}
            if takes_all:
                self._compute_on({length: self._longest}, length)
            elif tuple(fits) == tuple(held) == lengths:
                self._compute_on(held, length)
            else:
                self._held = {}
                self._version += 1
                await self._idle.wait()
                former = tuple(held)
                held.clear()
                try:
                    await self._switch(length, lengths, fits)
                except LoadError as error:
                    await self._restore(home, former, fits, error)
                    raise
            return self.report()

    async def _restore(self, home: int, lengths: tuple[int, ...], kept: Mapping[int, Held], error: LoadError) -> None:
        if not lengths:
            self.failure = error
            return
        try:
            await self._switch(home, lengths, kept)
        except LoadError:
            self.failure = error

    async def _switch(self, home: int, lengths: tuple[int, ...], kept: Mapping[int, Held]) -> None:
        self._compute_on(await self._worker.idly(lambda: self._load_all(lengths, kept)), home)
        self.failure = None

    def _load_all(self, lengths: Sequence[int], kept: Mapping[int, Held]) -> dict[int, Held]:
        """But for those that are `kept`. Raises LoadError."""
        found: dict[int, Held] = {}
        for length in lengths:
            try:
                found[length] = kept.get(length) or self._load(length)
            except Exception as failure:
                raise self._quarantined(length, failure) from failure
            self._failed.pop(length, None)
        return found

    @property
    def _longest(self) -> Held:
        return next(reversed(self._held.values()))

    def _curve(self) -> ServiceCurve:
        """What to expect of what is held."""
        now = time.monotonic()
        return ServiceCurve.of_set({held.runtime.max_length: held.times.curve(now) for held in self._held.values()})

    def _compute_on(self, held: dict[int, Held], home: int) -> None:
        """From now on."""
        if (held, home) != (self._held, self._home):
            self._held, self._home = held, home
            self._version += 1

    def _load(self, length: int) -> Held:
        memory = self._runtimes.memory
        if memory and not self._memory_mb:
            _measure(self._runtimes.load(length))  # takes what all share, too, and is gone behind this line
        before_mb = memory.used_mb() if memory else 0.0
        runtime = self._runtimes.load(length)
        if isinstance(runtime, BatchRuntime) and runtime.times:
            return Held(runtime, dict(zip(runtime.times.lengths, runtime.times.seconds[0], strict=True)))
        known = (runtime.max_length, runtime.backend)
        if known not in self._measured:
            self._measured[known] = _measure(runtime)
            if memory:
                self._memory_mb[length] = round(max(0.0, memory.used_mb() - before_mb), 1)
        return Held(runtime, self._measured[known])

    def _quarantined(self, max_length: int, failure: Exception) -> LoadError:
        reason = str(failure) if isinstance(failure, PliantError) else f"{type(failure).__name__}: {failure}"
        self._failed[max_length] = reason
        return LoadError(f"{max_length} tokens: {reason}")

    async def infer(self, query: Query) -> Answer | Refusal:
        """Answer `query`, or refuse it at once when it does not fit this runtime or cannot meet its budget.

        Raises what the runtime does.
        """
        held = self._fitting(query)
        if held is None:
            return Refusal("moved", "it does not hold a runtime for this length", report=self.report())
        curve = held.curve(time.monotonic())
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
        self._tokens += query.length
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
        held = self.held
        expected = self._curve() if held else None
        curve = expected.points if expected else ()
        return Report(
            version=self._version,
            max_length=held.max_length if held else 0,
            home=self._home if held else 0,
            lengths=tuple(each.runtime.max_length for each in self._held.values()),
            held={},
            service_s=curve[-1][1] if curve else 0.0,
            curve=curve,
            shares=expected.shares if expected else (),
            backend=held.backend if held else "",
            device=self._runtimes.device,
            resident=self._runtimes.resident,
            room_mb=memory.room_mb if (memory := self._runtimes.memory) else None,
            memory_mb=dict(self._memory_mb),
            reason=self._runtimes.reason,
            compiling=sorted(self.compiling),
            uncompiled=dict(self.uncompiled),
            failed=dict(self._failed),
            waiting=self._outstanding,
            tenants=self._worker.waiting_s(),
            margins={tenant: round(margin.value, 2) for tenant, margin in self._margins.items()},
            served=self.uses.total(),
            passes=self._worker.passes,
            tokens=self._tokens,
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
        held = self._fitting(query)
        return held.curve(time.monotonic()).work_seconds(query.length) if held else 0.0

    def _fitting(self, query: Query) -> Held | None:
        """The shortest that takes it."""
        return next((each for each in self._held.values() if query.length <= each.runtime.max_length), None)

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
