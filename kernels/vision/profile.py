"""Measures how long batches of images take under each gamma (OTAS §III-A, the task profiler; figures 4b and 7)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pliant.kernels.vision.executor import VisionExecutor
from pliant.kernels.vision.tasks import TaskWeights
from pliant.models.sources import Progress
from pliant.models.vision_head import Head

_ROUNDS = (3, 25)
"""The fewest and the most times that each batch is measured; in between, the budget decides."""
_LONGEST_S = 2.0
"""Batches beyond the first size that takes so long are not measured: there a row more costs what it did before."""
_PROBE = "profile of random prompts"


@dataclass(frozen=True)
class LatencyTable:
    """Seconds and bytes of one run, by gamma and rows."""

    gammas: tuple[int, ...]
    batches: tuple[int, ...]
    """The numbers of rows that were measured, rising."""
    seconds: tuple[tuple[float, ...], ...]
    """By gamma, then batch; a larger batch never takes less."""
    memory_bytes: tuple[tuple[int, ...], ...]
    """By gamma, then batch: about what a run takes beside weights."""

    def __post_init__(self) -> None:
        """Takes lists too, as JSON has them."""
        for name in ("gammas", "batches"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("seconds", "memory_bytes"):
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))

    def latency(self, gamma: int, rows: int) -> float:
        """Seconds of a batch of `rows`: linear between those that were measured, and beyond them.

        Raises ValueError if `gamma` was not measured.
        """
        curve = self.seconds[self.gammas.index(gamma)]
        if rows <= self.batches[-1]:
            return float(np.interp(rows, self.batches, curve))
        before = (self.batches[-2], curve[-2]) if len(curve) > 1 else (0, 0.0)
        return curve[-1] + (rows - self.batches[-1]) * (curve[-1] - before[1]) / (self.batches[-1] - before[0])


def measure(
    executor: VisionExecutor,
    gammas: Sequence[int],
    batches: Sequence[int],
    progress: Progress | None = None,
    budget_s: float = 30.0,
) -> LatencyTable:
    """The medians of interleaved runs on random images, and for gamma > 0 random prompts.

    Measuring stops after `budget_s`, or when each batch was run three times if that is later.
    """
    gammas, batches = sorted(set(gammas)), sorted(set(batches))
    executor.add_task(_PROBE, _random_task(executor, gammas))
    try:
        batches = _affordable(executor, gammas, batches)
        rounds = _rounds(executor, [(gamma, rows) for gamma in gammas for rows in batches], progress, budget_s)
    finally:
        executor.remove_task(_PROBE)
    curves = np.maximum.accumulate(np.median(rounds, axis=0).reshape(len(gammas), len(batches)), axis=1)
    memory = [[executor.memory_bytes(gamma, rows) for rows in batches] for gamma in gammas]
    return LatencyTable(gammas, batches, curves.tolist(), memory)  # type: ignore[arg-type]


def _affordable(executor: VisionExecutor, gammas: Sequence[int], batches: Sequence[int]) -> list[int]:
    """The batches up to the first that takes long, each run once, which warms up what must be warm."""
    for index, rows in enumerate(batches):
        if max(_seconds(executor, gamma, rows) for gamma in gammas) > _LONGEST_S:
            return list(batches[: index + 1])
    return list(batches)


def _rounds(
    executor: VisionExecutor, calls: Sequence[tuple[int, int]], progress: Progress | None, budget_s: float
) -> NDArray[np.float64]:
    """The seconds of each call, one round a row: each comes once, so that a slow moment falls on all alike."""
    fewest, most = _ROUNDS
    rounds: list[list[float]] = []
    begun = time.perf_counter()
    while len(rounds) < most:
        rounds.append([_seconds(executor, gamma, rows) for gamma, rows in calls])
        spent = (time.perf_counter() - begun) / budget_s
        if len(rounds) >= fewest and spent >= 1:
            break
        if progress:
            progress("measuring batches", min(1.0, max(spent, len(rounds) / most)))
    return np.array(rounds)


def _seconds(executor: VisionExecutor, gamma: int, rows: int) -> float:
    info = executor.info
    images = np.random.default_rng(rows).integers(
        256, size=(rows, info.height, info.width, info.channels), dtype=np.uint8
    )
    start = time.perf_counter()
    executor.run(images, [_PROBE] * rows, gamma)
    return time.perf_counter() - start


def _random_task(executor: VisionExecutor, gammas: Sequence[int]) -> TaskWeights:
    info = executor.info
    generator = torch.Generator().manual_seed(0)
    prompts: Mapping[int, torch.Tensor] = {
        gamma: torch.randn(info.layers, gamma, info.hidden, generator=generator) for gamma in gammas if gamma > 0
    }
    return TaskWeights({0: Head(torch.zeros(1, info.hidden), torch.zeros(1))}, prompts)
