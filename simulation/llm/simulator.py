"""One replica as discrete events, an iteration at a time: the live engine's policy objects, driven by a cost model.

Each iteration begins as the engine's does: loads that are over are told, the scheduler decides, adapters go and come,
requests are admitted. Then it computes the prompts it admitted and one token for each request that was live before. An
adapter loads while iterations run, and is noticed at the beginning of the next. A request reserves memory for all the
tokens it may come to have, as in S-LoRA: clients state a limit, and here it is the length that the answer will have.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pliant.policies.llm.jobs import Decisions, Job
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.simulation.llm.hardware import Costs
from pliant.simulation.llm.loads import Loads
from pliant.simulation.llm.outcome import Outcome, Request
from pliant.simulation.llm.predictors import Predictor

SLOTS = 1000
"""Requests that may run at a time, S-LoRA's default; memory is what limits them."""
PROMPTS_S = 0.1
"""What the prompts of an iteration may take beside a decode step, so that tokens come within the SLO of 150 ms (§5.2).
Those of the prompts that begin within it go, and the last is computed whole."""


class SimulationError(Exception):
    """The policy broke a law: memory over-allocated, a request lost or answered twice, an adapter that is not there."""


@dataclass(frozen=True)
class Loop:
    """How an engine goes about its iterations; by default as ours does."""

    every: int = 1
    """Requests join at the first iteration, and then this many after the last ones joined."""
    stalls: bool = False
    """Whether the next request's adapter, when it is not there yet, holds up the iteration."""
    prompts_share: float | None = None
    """Prompts of an iteration, in tokens, over the tokens that memory holds; None: as `PROMPTS_S` has it."""
    prompts_apart: bool = False
    """Whether first tokens are told before the decode step that follows."""


OUR_LOOP = Loop()


@dataclass
class _Live:
    """A request that runs."""

    job: Job[int, int]
    before: int
    """Tokens of its answer that there were when it was admitted."""
    started: int
    """The iteration that admitted it, and gave it a token."""

    def tokens(self, iteration: int) -> int:
        """Of its answer, when `iteration` is over."""
        return self.before + 1 + iteration - self.started


class Simulation:
    """Runs requests through a scheduler on a machine with certain costs; for one run.

    `sizes[i]` are the bytes of adapter i. With `debug` every iteration checks the scheduler's integrity.
    """

    def __init__(
        self,
        costs: Costs,
        sizes: Sequence[int],
        scheduler: Scheduler[int, int],
        predictor: Predictor,
        loop: Loop = OUR_LOOP,
        debug: bool = False,
    ) -> None:
        self._costs = costs
        self._sizes = sizes
        self._scheduler = scheduler
        self._predictor = predictor
        self._debug = debug
        self._loop = loop
        share = loop.prompts_share
        memory = costs.memory // costs.model.token_bytes
        self._prompts = costs.prompts_within(PROMPTS_S) if share is None else int(share * memory)
        self._link = Loads(costs)
        self._now = 0.0
        self._sent = self._iteration = self._waited = 0
        """Requests that have arrived, iterations, and those since the last admission."""
        self._live: dict[int, _Live] = {}
        self._ends: defaultdict[int, list[_Live]] = defaultdict(list)
        """Iteration -> who ends with it."""
        self._cached: set[int] = set()
        self._used = 0
        """Bytes, counted apart from the scheduler."""
        self._stored = self._read = 0
        """Tokens that live requests have stored, and the bytes of their adapters, once for each."""

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Every request, from its arrival to its last token. Raises SimulationError."""
        with _without_collection():
            self._requests = requests
            self._outcome = outcome = Outcome(requests)
            while outcome.answered < len(requests):
                self._receive()
                admitted = self._schedule()
                if admitted or self._live:
                    self._compute(admitted)
                else:
                    self._wait()
            outcome.link_busy_s = self._link.busy_s
            outcome.seconds = self._now
            if self._live or self._scheduler.waiting():
                raise SimulationError(f"all are answered, but {len(self._live)} run")
            return outcome

    def _receive(self) -> None:
        """Take what has come: requests, and adapters."""
        while self._sent < len(self._requests) and self._requests[self._sent].at_s <= self._now:
            self._add(self._sent)
            self._sent += 1
        while self._link.next_end <= self._now:
            self._scheduler.loaded(self._link.under_way.popleft()[1], self._now)

    def _schedule(self) -> list[_Live]:
        """Whose prompts are next."""
        joined = not self._live or self._waited >= self._loop.every
        admitted = self._decide(joined)
        if joined and self._loop.stalls:
            while (waiting := self._scheduler.waiting()) and waiting[0].adapter in self._link:
                self._now = max(self._now, self._link.next_end)
                self._receive()
                admitted += self._decide(joined)
        self._waited = 1 if admitted else self._waited + 1
        return admitted

    def _decide(self, joined: bool) -> list[_Live]:
        slots = SLOTS - len(self._live) if joined else 0
        return self._carry_out(self._scheduler.schedule(self._now, slots, self._prompts))

    def _compute(self, admitted: Sequence[_Live]) -> None:
        """An iteration."""
        decoding = len(self._live) - len(admitted)
        prefill_s, decode_s = self._seconds(admitted, decoding)
        self._now += prefill_s + decode_s
        for live in admitted:
            self._outcome.first_token(live.job.key, self._now - decode_s * self._loop.prompts_apart)
        self._outcome.step(prefill_s + decode_s, decoding)
        self._end()
        self._iteration += 1

    def _wait(self) -> None:
        """Until something happens, while nothing runs."""
        arrival = self._requests[self._sent].at_s if self._sent < len(self._requests) else math.inf
        self._now = min(arrival, self._link.next_end)
        if self._now == math.inf:
            raise SimulationError(f"{len(self._scheduler.waiting())} requests wait for nothing")

    def _add(self, key: int) -> None:
        request = self._requests[key]
        predicted = self._predictor.predict(key)
        charge = (request.prompt + request.output) * self._costs.model.token_bytes
        size = self._sizes[request.adapter]
        job = Job(key, request.prompt, predicted, charge, request.adapter, size, request.at_s)
        self._scheduler.add(job, self._now)

    def _carry_out(self, decisions: Decisions[int, int]) -> list[_Live]:
        """Do what was decided; who was admitted."""
        for adapter in decisions.evict:
            self._cached.remove(adapter)
            self._used -= self._sizes[adapter]
        for key in decisions.squash:
            self._leave(key, self._iteration - 1)
            self._outcome.squashed += 1
        if decisions.evict and (lost := self._in_use.intersection(decisions.evict)):
            raise SimulationError(f"adapters {lost} are evicted while they are in use")
        for adapter in decisions.load:
            self._cached.add(adapter)
            self._used += self._sizes[adapter]
            self._link.load(adapter, self._sizes[adapter], self._now)
        admitted = [self._admit(job) for job in decisions.admit]
        if self._used > self._costs.memory:
            raise SimulationError(f"{self._used} bytes are given out, of {self._costs.memory}")
        if self._debug:
            self._scheduler.check()
            if self._scheduler.used != self._used:
                raise SimulationError(f"{self._scheduler.used} bytes are counted, {self._used} are given out")
        return admitted

    @property
    def _in_use(self) -> set[int | None]:
        return {live.job.adapter for live in self._live.values()}

    def _admit(self, job: Job[int, int]) -> _Live:
        if job.key in self._live or job.adapter not in self._cached:
            raise SimulationError(f"request {job.key} runs already, or its adapter {job.adapter} is not there")
        if job.adapter in self._link:
            raise SimulationError(f"request {job.key} is admitted while its adapter {job.adapter} loads")
        live = _Live(job, self._outcome.tokens[job.key], self._iteration)
        self._live[job.key] = live
        self._ends[self._iteration + self._requests[job.key].output - live.before - 1].append(live)
        self._used += job.charge
        self._stored += self._length(live)
        self._read += job.adapter_bytes
        return live

    def _leave(self, key: int, iteration: int) -> None:
        """A request runs no more after `iteration`."""
        live = self._live.pop(key)
        self._outcome.tokens[key] = live.tokens(iteration)
        self._used -= live.job.charge
        self._stored -= self._requests[key].prompt + live.tokens(iteration) - 1
        self._read -= live.job.adapter_bytes

    def _length(self, live: _Live) -> int:
        """Tokens that its prefill computes."""
        return self._requests[live.job.key].prompt + live.before

    def _seconds(self, admitted: Sequence[_Live], decoding: int) -> tuple[float, float]:
        """Of the prompts, and of the tokens of those that run already."""
        prompts = [(self._length(live), live.job.adapter_bytes) for live in admitted]
        stored = self._stored - sum(length for length, _ in prompts)
        read = self._read - sum(bytes for _, bytes in prompts)
        self._stored += decoding
        return self._costs.prefill_s(prompts), self._costs.decode_s(decoding, stored, read)

    def _end(self) -> None:
        """Tell who got tokens, and end those who have all."""
        scheduler = self._scheduler
        for key, live in self._live.items():
            scheduler.generated(key, live.tokens(self._iteration))
        for live in self._ends.pop(self._iteration, ()):
            key = live.job.key
            if self._live.get(key) is not live:  # it was squashed
                continue
            request = self._requests[key]
            self._leave(key, self._iteration)
            if self._outcome.tokens[key] != request.output:
                raise SimulationError(f"request {key} got {self._outcome.tokens[key]} tokens, not {request.output}")
            self._outcome.ended(key, self._now)
            scheduler.ended(key, self._now)
            self._predictor.observe(key)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Nothing here is cyclic, and looking for garbage would take a good part of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
