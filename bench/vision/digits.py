"""The zoo's small vision transformer on this machine: its profile, as a service has it (OTAS §III-A)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pliant.bench.vision import profiles
from pliant.bench.vision.profiles import MOST_ROWS, Profile
from pliant.bench.vision.second_passes import Answers, answered
from pliant.config.vision import VisionConfig
from pliant.deployments.vision import assembly
from pliant.deployments.vision.accuracy import Run, measured
from pliant.deployments.vision.assembly import Loaded
from pliant.formats.vision_task import TaskInfo, read_profiling, read_task
from pliant.models import sources
from pliant.models.sources import Progress

_CONFIG = VisionConfig(kind="vision", model="zoo/digits-vit", tasks={"folder": "zoo/digits-tasks"}, compile=True)  # type: ignore[arg-type]


def profile(progress: Progress | None = None) -> Profile:
    """Measured, and kept in the cache; trains and compiles the model if that has not been done. Raises ModelError."""
    loaded = assembly.load(_CONFIG, progress)
    accuracies = {}
    for task, run in _tasks(loaded):
        usable = [gamma for gamma in loaded.gammas if gamma <= 0 or gamma in task.prompts]
        accuracies[task.name] = measured(task, usable, run, loaded.executor.most_rows, loaded.identity)
    rows = range(1, MOST_ROWS + 1)
    seconds = [[loaded.latency(gamma, row) for row in rows] for gamma in loaded.gammas]
    return profiles.measured("digits-vit", loaded.gammas, rows, seconds, accuracies)


def answers() -> dict[str, dict[int, Answers]]:
    """To the profiling images, by task and gamma. Raises ModelError."""
    loaded = assembly.load(_CONFIG)
    return {task.name: answered(run, *read_profiling(task), loaded.gammas, MOST_ROWS) for task, run in _tasks(loaded)}


def _tasks(loaded: Loaded) -> Iterator[tuple[TaskInfo, Run]]:
    """Those of the zoo, in memory."""
    executor = loaded.executor
    for folder in sources.task_folders("zoo/digits-tasks"):
        task = read_task(folder, executor.info)
        executor.add_task(task.name, executor.stage(folder))

        def run(images: NDArray[np.uint8], gamma: int, name: str = task.name) -> Sequence[NDArray[np.float32]]:
            return executor.run(images, [name] * len(images), gamma)

        yield task, run
