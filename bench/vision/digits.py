"""The zoo's small vision transformer on this machine: its profile, as a service has it (OTAS §III-A)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pliant.bench.vision import profiles
from pliant.bench.vision.profiles import MOST_ROWS, Profile
from pliant.config.vision import VisionConfig
from pliant.deployments.vision import assembly
from pliant.deployments.vision.accuracy import measured
from pliant.formats.vision_task import read_task
from pliant.models import sources
from pliant.models.sources import Progress

_CONFIG = VisionConfig(kind="vision", model="zoo/digits-vit", tasks={"folder": "zoo/digits-tasks"}, compile=True)  # type: ignore[arg-type]


def profile(progress: Progress | None = None) -> Profile:
    """Measured, and kept in the cache; trains and compiles the model if that has not been done. Raises ModelError."""
    loaded = assembly.load(_CONFIG, progress)
    executor = loaded.executor
    accuracies = {}
    for folder in sources.task_folders("zoo/digits-tasks", progress):
        task = read_task(folder, executor.info)
        executor.add_task(task.name, executor.stage(folder))

        def run(images: NDArray[np.uint8], gamma: int, name: str = task.name) -> Sequence[NDArray[np.float32]]:
            return executor.run(images, [name] * len(images), gamma)

        usable = [gamma for gamma in loaded.gammas if gamma <= 0 or gamma in task.prompts]
        accuracies[task.name] = measured(task, usable, run, executor.most_rows, loaded.identity)
    rows = range(1, MOST_ROWS + 1)
    seconds = [[loaded.latency(gamma, row) for row in rows] for gamma in loaded.gammas]
    return profiles.measured("digits-vit", loaded.gammas, rows, seconds, accuracies)
