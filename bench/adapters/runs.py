"""Simulated runs, many at a time: what is run, what is kept of it, and the load that a system can take."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pliant.bench.adapters import workload
from pliant.bench.adapters.systems import System
from pliant.bench.adapters.workload import Lengths, Population
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.queue_classes import weighted_size
from pliant.simulation.arrivals import Floats, Integers
from pliant.simulation.llm.hardware import A40, LLAMA_7B, Costs
from pliant.simulation.llm.predictors import NoisyOracle, Online
from pliant.simulation.llm.simulator import Simulation

SLO = 5.0
"""Times what an unloaded system takes (§2, §5.1)."""
WARMUP_S = 60.0
"""Requests that arrive before are simulated and not counted: caches and classes start with nothing."""
SCALE = 0.25
"""Of the trace's lengths. As they are, 8.7 requests in a second, where S-LoRA first violates the SLO in the paper
(§5.2), need 139 TFLOP/s for prompts alone, of an A40's peak of 150. With a quarter it violates it at about that."""

_SAMPLE = 20_000
_MAIN = Costs(A40, LLAMA_7B)


@dataclass(frozen=True)
class Case:
    """The machine, the model and the load, up to its rate."""

    costs: Costs = _MAIN
    adapters: int = 100
    scale: float = SCALE
    data: Path | None = None
    recorded: bool = False
    """Whether adapters are as popular as the models of a trace in `data`."""

    @property
    def lengths(self) -> Lengths:
        return _lengths(self.data, self.scale)

    @property
    def population(self) -> Population:
        if self.recorded and self.data:
            return workload.recorded_population(self.data)
        return workload.population(self.adapters)


class Run(NamedTuple):
    """One simulation: requests arrive for `seconds`, and all are answered."""

    case: Case
    system: System
    rate: float
    seconds: float
    seed: int


@dataclass(frozen=True)
class Result:
    """What is kept of a run. Arrays are by request, of those that arrived after the warm-up; times are in seconds."""

    p99_alone: float
    """Of the times to the first token of all requests that the case may bring, each alone on the machine."""
    at_s: Floats
    first: Floats
    """From arrival to the first token."""
    last: Floats
    """From arrival to the last one."""
    last_alone: Floats
    """The same of the request alone on the machine, its adapter loaded for it."""
    rank: Integers
    size: Floats
    """Weighted size of the request as it turned out, 0 to 1."""
    between_tokens: float
    """P99 of the time between two tokens."""
    squashed: float
    """Times that a request was, for each request."""
    hits: float
    """Share of requests whose adapter was resident when they arrived."""
    link: float
    """Share of the time that it was busy."""

    def p99(self) -> float:
        """Of the time to the first token."""
        return float(np.quantile(self.first, 0.99))

    def p50(self) -> float:
        """Of the time to the first token."""
        return float(np.median(self.first))

    def inflation(self) -> float:
        """P99 of the time to the first token, over that of requests alone; the SLO is 5."""
        return self.p99() / self.p99_alone


def simulate(run: Run) -> Result:
    """Run it, here and now."""
    case, costs = run.case, run.case.costs
    adapters = case.population
    sizes = [costs.model.adapter_bytes(rank) for rank in adapters.ranks]
    requests = workload.poisson(run.rate, run.seconds, case.lengths, adapters, run.seed)
    last_alone = [costs.alone_s(request.prompt, request.output, sizes[request.adapter])[1] for request in requests]
    cached: AdapterCache[int] = AdapterCache(run.system.cache)
    scheduler = run.system.scheduler(cached, costs.memory, SLO * _alone(case).last)
    accuracy = run.system.accuracy
    predictor = Online(requests) if accuracy is None else NoisyOracle(requests, accuracy, run.seed)
    outcome = Simulation(costs, sizes, scheduler, predictor, run.system.loop).run(requests)
    arrived = np.array([request.at_s for request in requests])
    counted = arrived >= min(WARMUP_S, run.seconds / 4)
    shapes = np.array([(request.prompt, request.output, sizes[request.adapter]) for request in requests])
    stats = cached.stats
    return Result(
        p99_alone=_alone(case).first_p99,
        at_s=arrived[counted],
        first=outcome.to_first_token[counted],
        last=outcome.latencies[counted],
        last_alone=np.array(last_alone)[counted],
        rank=np.array([adapters.ranks[request.adapter] for request in requests])[counted],
        size=weighted_size(shapes, shapes.max(axis=0))[counted],
        between_tokens=outcome.between_tokens(0.99),
        squashed=outcome.squashed / len(requests),
        hits=stats.hits / max(1, stats.hits + stats.misses),
        link=outcome.link_busy_s / outcome.seconds,
    )


class Runs:
    """Runs simulations on all cores, each once; a context manager. `done` is called after each."""

    def __init__(self, done: Callable[[], object] = lambda: None) -> None:
        self._done = done
        self._results: dict[Run, Result] = {}

    def __enter__(self) -> Runs:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def all(self, runs: Iterable[Run]) -> list[Result]:
        """A result for each."""
        runs = list(runs)
        new = [run for run in dict.fromkeys(runs) if run not in self._results]
        for run, result in zip(new, self._pool.map(simulate, new), strict=True):
            self._results[run] = result
            self._done()
        return [self._results[run] for run in runs]

    def limits(
        self, cases: Sequence[tuple[Case, System]], seeds: Sequence[int], seconds: float, rounds: int
    ) -> list[list[float]]:
        """For each case and system, and each seed, the rate at which P99 of the time to the first token meets the SLO.

        Halves the logarithm of a range that begins with an eighth of what prompts alone let the machine compute.
        """
        wanted = [(case, system, seed) for case, system in cases for seed in seeds]
        low = [_most_rate(case) / 8 for case, _, _ in wanted]
        high = [_most_rate(case) * 1.5 for case, _, _ in wanted]
        for _ in range(rounds):
            rates = [math.sqrt(least * most) for least, most in zip(low, high, strict=True)]
            tried = [
                Run(case, system, rate, seconds, seed) for (case, system, seed), rate in zip(wanted, rates, strict=True)
            ]
            for index, result in enumerate(self.all(tried)):
                side = low if result.inflation() <= SLO else high
                side[index] = rates[index]
        found = [math.sqrt(least * most) for least, most in zip(low, high, strict=True)]
        return [found[start : start + len(seeds)] for start in range(0, len(found), len(seeds))]


def _most_rate(case: Case) -> float:
    """Requests in a second whose prompts the machine can just compute."""
    return 1 / case.costs.prefill_s([(round(float(case.lengths.prompts.mean())), 0)])


class _Alone(NamedTuple):
    first_p99: float
    last: float
    """On average."""


@cache
def _alone(case: Case) -> _Alone:
    """How long requests take that are alone on the machine, over many of them."""
    adapters = case.population
    sizes = [case.costs.model.adapter_bytes(rank) for rank in adapters.ranks]
    many = workload.poisson(1.0, _SAMPLE, case.lengths, adapters, seed=0)
    times = [case.costs.alone_s(request.prompt, request.output, sizes[request.adapter]) for request in many]
    first, last = np.array(times).T
    return _Alone(float(np.quantile(first, 0.99)), float(last.mean()))


@cache
def _lengths(data: Path | None, scale: float) -> Lengths:
    return workload.conversations(data).scaled(scale)
