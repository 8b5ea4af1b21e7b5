"""One replica's queue and executor: holds a runtime of one max_length, answers what fits, refuses the rest (Arlo §3.1).

Plain asyncio, without Ray: the Serve shell is `replica.py`.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

import numpy as np

from pliant.formats.profile import Profile
from pliant.policies.cascade.calibration import confidence, softmax
from pliant.policies.encoder.admission import retry_after

_GRID = math.log(1.1)
_RECENT_SERVICE_TIMES = 32
_RECENT_LATENCIES = 512
_MEASURED_CALLS = 5


class Runtime(Protocol):
    """A model compiled for one max_length, as `pliant.kernels.encoder.compiled_classifier.load` returns it."""

    max_length: int
    dynamic: bool
    """Computes each text at its own length, instead of padding it to max_length."""
    backend: str

    def __call__(self, ids: np.ndarray | Sequence[int]) -> np.ndarray: ...


class Told(Protocol):
    """What a runtime says of one text and its tokens."""

    @property
    def logits(self) -> np.ndarray: ...

    @property
    def importance(self) -> np.ndarray | None:
        """float32 [tokens]: the attention that each token received; None if it was not wanted."""

    @property
    def telling_s(self) -> float:
        """Seconds that importance took beyond the logits."""


@runtime_checkable
class TellingRuntime(Runtime, Protocol):
    """One that can tell which tokens are important, as `pliant.kernels.encoder.telling_classifier.load` returns it."""

    def tell(self, ids: np.ndarray | Sequence[int], wanted: Callable[[np.ndarray], bool]) -> Told: ...


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


class Assignment(NamedTuple):
    """What one replica, and no other, is told: to hold the runtime of `max_length`."""

    replica: str
    max_length: int


class Telling(NamedTuple):
    """Which answers are to come with the importance of tokens: those that a cascade is not sure of."""

    temperature: float
    """That logits are calibrated with."""
    below: float
    """The calibrated confidence from which on importance is not wanted."""

    def wants(self, logits: np.ndarray) -> bool:
        return bool(confidence(softmax(logits, self.temperature)) < self.below)


class Query(NamedTuple):
    """One tokenized text on its way to a replica."""

    ids: bytes
    """Token ids, little-endian int32."""
    length: int
    """How many there are."""
    budget_s: float | None
    """Seconds left until the SLO; None once the request must be answered however late (its first replica failed)."""
    utility: float
    """Share of its slack that it may spend waiting, 0 to 1."""
    telling: Telling | None = None
    """For which answers to tell the attention that each token received, too."""


@dataclass(frozen=True, slots=True)
class Answer:
    logits: bytes
    """float32, one per label."""
    max_length: int
    """Of the runtime that computed them."""
    computed: int
    """Tokens that it computed, padding included."""
    importance: bytes = b""
    """float32, one per token of the query; empty unless the query wants it, and the runtime tells."""
    telling_s: float = 0.0
    """Seconds that importance took beyond the logits."""
    compute_s: float = 0.0
    """Seconds that the logits took."""


class Report(TypedDict):
    """What a replica tells routers and people about itself."""

    version: int
    """Rises with every switch: the newer of two reports is right."""
    max_length: int
    """0 while it switches."""
    service_s: float
    """Seconds that one request takes, on a grid of 10% steps, so that equal replicas report equal times."""
    backend: str
    device: str
    compiling: list[int]
    """Lengths that are not compiled yet: what it computes on may change."""
    uncompiled: str
    """Why the model stays uncompiled; empty unless it does."""
    failed: dict[int, str]
    """Lengths that it could not load, and why; it is not asked for them again for some time."""
    waiting: int
    served: int
    computed_tokens: int
    """Of the served, padding included."""
    p50_ms: float
    p98_ms: float
    """Of the recent requests, in this replica: queue and computation."""


class LoadError(Exception):
    """A runtime could not be loaded; the replica holds what it held before."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not computed: the router was mistaken about this replica, and should be told better by `report`."""

    reason: Literal["length", "busy"]
    replica: str
    report: Report
    retry_after_s: float = 0.0


class _Computation(NamedTuple):
    logits: np.ndarray
    importance: np.ndarray | None
    telling_s: float
    seconds: float
    """Telling included."""


class Engine:
    """Runs one request at a time on the runtime it holds, in order of arrival.

    Runtimes are loaded and measured in the worker thread, so the event loop never blocks. The queue is bounded by the
    requests' budgets; those without one are bounded by what Serve lets a replica have outstanding.
    """

    def __init__(self, replica: str, runtimes: Runtimes) -> None:
        self._replica = replica
        self._runtimes = runtimes
        self._measured: dict[tuple[int, str], float] = {}
        """Length and backend -> seconds of a call."""
        self._failed: dict[int, str] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="runtime")
        self._switching = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runtime: Runtime | None = None
        self._version = 0
        self._outstanding = 0
        self._computed = 0
        self._computing_since: float | None = None
        self.failure: Exception | None = None
        """Why it holds no runtime at all; until it does, all requests are refused."""
        self.compiling: set[int] = set()
        """Lengths of which a compiled runtime is yet to come."""
        self.uncompiled = ""
        """Why some stay uncompiled."""
        self.uses: Counter[int] = Counter()
        """Answers by the max_length of the runtime that computed them."""
        self._latencies: deque[float] = deque(maxlen=_RECENT_LATENCIES)
        self._service_times: deque[float] = deque(maxlen=_RECENT_SERVICE_TIMES)

    @property
    def held(self) -> Runtime | None:
        """What it computes on; None while it switches."""
        return self._runtime

    async def renew(self) -> None:
        """Load what is held once more, as a faster one may be there now, while requests are answered as before."""
        async with self._switching:
            if self._runtime is None:
                return
            runtime, seconds = await asyncio.to_thread(self._load, self._runtime.max_length)
            self._compute_on(runtime, seconds)

    async def hold(self, max_length: int) -> Report:
        """Switch to the runtime of `max_length`: refuse new requests, finish the accepted ones, load.

        Raises LoadError when it cannot be loaded. What was held before is then held again; only when that fails too, or
        nothing was held, `failure` is set.
        """
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
        runtime, seconds = await asyncio.get_running_loop().run_in_executor(self._worker, self._load, max_length)
        self._compute_on(runtime, seconds)
        self._failed.pop(max_length, None)
        self.failure = None

    def _compute_on(self, runtime: Runtime, seconds: float) -> None:
        """From now on; `seconds` is what a call takes."""
        self._service_times.clear()
        self._service_times.append(seconds)
        self._runtime = runtime
        self._version += 1

    def _load(self, max_length: int) -> tuple[Runtime, float]:
        runtime = self._runtimes.load(max_length)
        known = (max_length, runtime.backend)
        if known not in self._measured:
            self._measured[known] = _measure(runtime)
        return runtime, self._measured[known]

    def _quarantined(self, max_length: int, failure: Exception) -> LoadError:
        reason = f"{type(failure).__name__}: {failure}"
        self._failed[max_length] = reason
        return LoadError(f"{max_length} tokens: {reason}")

    async def infer(self, query: Query) -> Answer | Refusal:
        """Answer `query`, or refuse it at once when it does not fit this runtime or cannot meet its budget."""
        runtime = self._runtime
        if runtime is None or query.length > runtime.max_length:
            return Refusal("length", self._replica, self.report())
        if wait_s := self._must_wait_s(query):
            return Refusal("busy", self._replica, self.report(), wait_s)
        arrived = time.perf_counter()
        self._outstanding += 1
        self._idle.clear()
        try:
            loop = asyncio.get_running_loop()
            computation = await loop.run_in_executor(self._worker, self._compute, runtime, query)
        finally:
            self._outstanding -= 1
            if not self._outstanding:
                self._idle.set()
        self._service_times.append(computation.seconds)
        self.uses[runtime.max_length] += 1
        self._latencies.append(time.perf_counter() - arrived)
        computed = query.length if runtime.dynamic else runtime.max_length
        self._computed += computed
        return Answer(
            logits=computation.logits.tobytes(),
            max_length=runtime.max_length,
            computed=computed,
            importance=b"" if computation.importance is None else computation.importance.tobytes(),
            telling_s=computation.telling_s,
            compute_s=computation.seconds - computation.telling_s,
        )

    def report(self) -> Report:
        recent = sorted(self._latencies)
        return Report(
            version=self._version,
            max_length=self._runtime.max_length if self._runtime else 0,
            service_s=self._service_s(),
            backend=self._runtime.backend if self._runtime else "",
            device=self._runtimes.device,
            compiling=sorted(self.compiling),
            uncompiled=self.uncompiled,
            failed=dict(self._failed),
            waiting=self._outstanding,
            served=self.uses.total(),
            computed_tokens=self._computed,
            p50_ms=round(recent[len(recent) // 2] * 1e3, 2) if recent else 0.0,
            p98_ms=round(recent[int(len(recent) * 0.98)] * 1e3, 2) if recent else 0.0,
        )

    def computing_s(self) -> float:
        """Seconds that the computation under way has taken; 0 when none is."""
        since = self._computing_since
        return 0.0 if since is None else time.perf_counter() - since

    def _must_wait_s(self, query: Query) -> float:
        """Seconds until `query` could be admitted; 0 when it can be now."""
        if query.budget_s is None:
            return 0.0
        service_s = self._service_s()
        return retry_after(self._outstanding * service_s, service_s, service_s, query.budget_s, query.utility)

    def _compute(self, runtime: Runtime, query: Query) -> _Computation:
        ids = np.frombuffer(query.ids, dtype="<i4")
        importance, telling_s = None, 0.0
        self._computing_since = started = time.perf_counter()
        try:
            if query.telling and isinstance(runtime, TellingRuntime):
                told = runtime.tell(ids, query.telling.wants)
                logits, importance, telling_s = told.logits, told.importance, told.telling_s
            else:
                logits = runtime(ids)
        finally:
            self._computing_since = None
        return _Computation(logits, importance, telling_s, time.perf_counter() - started)

    def _service_s(self) -> float:
        if not self._service_times:
            return 0.0
        return math.exp(math.ceil(math.log(statistics.median(self._service_times)) / _GRID) * _GRID)


def _measure(runtime: Runtime) -> float:
    """Seconds that a call with `max_length` tokens takes: the median of a few, after one to warm up."""
    ids = np.ones(runtime.max_length, dtype=np.int64)
    runtime(ids)
    seconds = []
    for _ in range(_MEASURED_CALLS):
        started = time.perf_counter()
        runtime(ids)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
