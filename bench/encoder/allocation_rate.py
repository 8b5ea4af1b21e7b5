"""How long the exact allocation of runtimes takes (Arlo §3.3; Table 2), and that of sets of them, without a cluster."""

from __future__ import annotations

import time
from itertools import product

import numpy as np

from pliant.bench.report import Figure, median
from pliant.policies.encoder.configurations import ResidentRuntime, place
from pliant.policies.encoder.runtime_allocation import RuntimeClass, allocate, runtime_class

_SIZES = {
    (50, 8): ("<= 0.02", "paper: 0.156"),
    (200, 12): ("<= 0.03", "paper: 0.623"),
    (1_000, 16): ("<= 0.1", "paper: 2.612"),
    (10_000, 32): ("<= 2", "not in the paper"),
}
"""(GPUs, runtimes) -> the target, in seconds, and what the paper took with a commercial solver."""
_LOADS = (0.5, 0.75, 0.9, 0.97)
"""Share of the pool's capacity that is demanded."""
_ROOM = (0.2, 0.5, 1.0)
"""Share of the runtimes' memory that a replica has."""
_SEEDS = 3
_LONGEST = 512
_SLO_S = 0.15


def figures(repeats: int) -> list[Figure]:
    """Seconds to allocate, the median over loads and seeds of the least of `repeats` times.

    Raises RuntimeError if an allocation is not proven optimal.
    """
    allocate(*_problem(10, 4, _LOADS[0], seed=0))
    found = []
    for (replicas, runtimes), (target, paper) in _SIZES.items():
        problems = [_problem(replicas, runtimes, load, seed) for load in _LOADS for seed in range(_SEEDS)]
        seconds = [min(_seconds(*problem) for _ in range(repeats)) for problem in problems]
        beside = f"{paper}; {len(problems)} problems, all proven optimal"
        found.append(median(f"allocation_seconds_{replicas}x{runtimes}", seconds, target, beside))
    return [*found, *_placements(repeats)]


def _placements(repeats: int) -> list[Figure]:
    """Sets of runtimes for 1,000 replicas by 16 lengths, with room for some or all; and how good they are."""
    seconds, gaps = [], []
    for share in _ROOM:
        for load, seed in product(_LOADS, range(_SEEDS)):
            classes, demand, replicas = _problem(1_000, 16, load, seed)
            resident = [ResidentRuntime(each.max_length, 1 / each.capacity, each.max_length) for each in classes]
            memory = max(share * sum(runtime.memory_mb for runtime in resident), resident[-1].memory_mb)
            took = []
            for _ in range(repeats):
                started = time.perf_counter()
                placement = place(resident, demand, replicas, memory)
                took.append(time.perf_counter() - started)
            seconds.append(min(took))
            gaps.append(placement.load / placement.bound - 1)
    beside = f"room for {_ROOM[0]:.0%} to {_ROOM[-1]:.0%} of the lengths; at most {max(gaps):.2%} above the least load"
    return [median("placement_seconds_1000x16", seconds, "<= 0.2", beside)]


def _problem(replicas: int, runtimes: int, load: float, seed: int) -> tuple[list[RuntimeClass], list[float], int]:
    """Evenly spaced runtimes, and log-normal lengths (median 100 tokens), 20% more or fewer in each of them."""
    rng = np.random.default_rng(seed)
    ends = np.arange(1, runtimes + 1) * _LONGEST // runtimes
    classes = [runtime_class(int(end), 0.6e-3 + 4.3e-3 * float(end) / _LONGEST, _SLO_S) for end in ends]
    lengths = np.clip(rng.lognormal(4.6, 0.9, 100_000), 4, _LONGEST)
    share = np.histogram(lengths, bins=(0, *ends))[0] * rng.uniform(0.8, 1.2, runtimes)
    needed = sum(share / [runtime.capacity for runtime in classes])
    return classes, (share * load * replicas / needed).tolist(), replicas


def _seconds(classes: list[RuntimeClass], demand: list[float], replicas: int) -> float:
    started = time.perf_counter()
    allocation = allocate(classes, demand, replicas)
    seconds = time.perf_counter() - started
    if not allocation.proven:
        raise RuntimeError(f"the allocation of {replicas} replicas to {len(classes)} runtimes is not proven optimal")
    return seconds
