"""Simulated runs, many at a time, each once."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from pliant.bench.vision import optimum
from pliant.bench.vision.profiles import Profile
from pliant.bench.vision.systems import OURS, Fixed, Models, SlackFit, System
from pliant.bench.vision.workload import Trace
from pliant.simulation.vision.outcome import Outcome, Query

_PART_S = 30.0
BLOCKS = 5
"""Spans of a workload, by which what came of it varies."""


class Run(NamedTuple):
    """A system on a device, with the queries of a trace."""

    profile: Profile
    system: System
    trace: Trace


def simulate(run: Run) -> Outcome:
    """Run it, here and now."""
    queries = _queries(run.trace, run.profile.per_s(), run.profile.roles)
    return run.system.simulation(run.profile).run(queries)


@dataclass(frozen=True)
class Compared:
    """One workload, and what became of it with each system."""

    workload: str
    trace: Trace
    outcomes: Mapping[str, Outcome]
    infaas: Models
    """With the best of its settings."""
    slackfit: SlackFit
    """The same."""
    best_fixed: Fixed
    """Of all gammas, 0 too."""
    bound: float
    """Expected utility that nobody exceeds, over that of ours, on a part of the trace, and about that on all of it."""

    @property
    def ours(self) -> Outcome:
        return self.outcomes[OURS.name]

    def over(self, system: str) -> float:
        """Our utility over that of another; infinite if that earns nothing."""
        theirs = self.outcomes[system].utility
        return self.ours.utility / theirs if theirs else math.inf

    def versus(self, system: str) -> tuple[float, list[float]]:
        """The same, of all and by blocks, in each of which the other earns something."""
        pairs = zip(self.ours.blocks(BLOCKS), self.outcomes[system].blocks(BLOCKS), strict=True)
        return self.over(system), [mine / other for mine, other in pairs]


class Runs:
    """Runs simulations on all cores; a context manager. `done` is called after each."""

    def __init__(self, done: Callable[[], object] = lambda: None) -> None:
        self._done = done

    def __enter__(self) -> Runs:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def all(self, profile: Profile, systems: Sequence[System], trace: Trace) -> dict[str, Outcome]:
        """By the system's name."""
        outcomes = {}
        runs = [Run(profile, system, trace) for system in systems]
        for system, outcome in zip(systems, self._pool.map(simulate, runs), strict=True):
            outcomes[system.name] = outcome
            self._done()
        return outcomes

    def bound(self, profile: Profile, trace: Trace) -> float:
        """Utility that nobody exceeds, taken as the sum of bounds for parts of the trace."""
        per_s, roles = profile.per_s(), profile.roles
        jobs = [(profile, queries) for queries in _parts(trace.queries(per_s, roles))]
        bounds = sum(self._pool.map(_bound, jobs))
        self._done()
        return bounds


def _bound(job: tuple[Profile, list[Query]]) -> float:
    return optimum.at_most(*job)


def _parts(queries: Sequence[Query]) -> list[list[Query]]:
    """Those that arrive in the same stretch of time."""
    return [list(part) for _, part in groupby(queries, lambda query: query.arrival // _PART_S)]


@lru_cache(maxsize=1)
def _queries(trace: Trace, per_s: float, roles: tuple[str, ...]) -> list[Query]:
    return trace.queries(per_s, roles)
