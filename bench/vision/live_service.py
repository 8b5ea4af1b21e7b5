"""The vision service's own parts on this machine, without Ray: a model in memory, its tasks, and images."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.vision.device import Executor
from pliant.deployments.vision.engine import Device
from pliant.deployments.vision.tasks import Tasks, key
from pliant.deployments.vision.useful_gammas import UsefulGammas
from pliant.formats.vision_task import TaskRef
from pliant.policies.vision.token_profile import TokenProfile
from pliant.training.vision import Examples

PER_S = 580
"""Of the paper's device at gamma 0. A faster one computes each batch several times: the event loop, the clients and the
bench share one interpreter, which thousands of images a second would keep busy by themselves."""
_PROBE = "probe"


class Repeated:
    """`executor`, every run of which takes `times` times as long: so long that it is about as fast as the paper's."""

    def __init__(self, executor: Executor) -> None:
        self.info, self.backend, self.most_rows = executor.info, executor.backend, executor.most_rows
        self._executor = executor
        self.times = max(1, round(_per_s(executor) / PER_S))

    def stage(self, folder: Path) -> Any:
        return self._executor.stage(folder)

    def own_task(self) -> Any | None:
        return self._executor.own_task()

    def add_task(self, key: str, weights: Any) -> None:
        self._executor.add_task(key, weights)

    def remove_task(self, key: str) -> None:
        self._executor.remove_task(key)

    def room(self, rows: int) -> NDArray[np.uint8]:
        return self._executor.room(rows)

    def run(self, images: NDArray[np.uint8], tasks: Sequence[str], gamma: int) -> Sequence[NDArray[np.float32]]:
        for _ in range(self.times - 1):
            self._executor.run(images, tasks, gamma)
        return self._executor.run(images, tasks, gamma)


@dataclass(frozen=True)
class Service:
    """What systems take turns with. Made for one event loop."""

    device: Device
    tasks: Tasks
    refs: Mapping[str, TaskRef]
    held_out: Mapping[str, Examples]
    """Images that nothing has seen before, by task."""
    gammas: tuple[int, ...]
    latency: Callable[[int, int], float]
    """Seconds, as profiled, for gamma and images."""
    most_rows: int
    about: str
    labelled: bool = True
    """Whether the images show what their labels say; else answers are right as often as the profile says."""

    def profile(self, gammas: Sequence[int] | None = None) -> TokenProfile:
        """What a system plans with: all gammas of any use, or these."""
        if gammas is not None:
            return TokenProfile(gammas, self.latency, self.tasks.accuracy, self.most_rows)
        useful = UsefulGammas(self.about, self.gammas, self.latency, self.tasks, self.most_rows)
        return TokenProfile(self.gammas, self.latency, useful.accuracy, self.most_rows)


def roles(service: Service) -> tuple[str, ...]:
    """The tasks in table II's roles: the hardest is in the middle."""
    first, second, hardest = sorted(service.refs, key=lambda name: -_accuracy(service, name))
    return first, hardest, second


def _accuracy(service: Service, task: str) -> float:
    return service.tasks.accuracy(key(service.refs[task]), 0) or 0.0


async def capacity(service: Service, batches: int = 7) -> float:
    """Images per second at gamma 0, in the largest batches; the median."""
    task, examples = next(iter(service.held_out.items()))
    images = [image.tobytes() for image in examples.images[: service.most_rows]]
    took = []
    for _ in range(batches):
        begun = time.perf_counter()
        await service.device.run(images, [key(service.refs[task])] * len(images), 0)
        took.append(time.perf_counter() - begun)
    return len(images) / statistics.median(took)


def _per_s(executor: Executor) -> float:
    """Images per second at gamma 0, in the largest batches."""
    info, rows = executor.info, executor.most_rows
    images = np.zeros((rows, info.height, info.width, info.channels), np.uint8)
    executor.add_task(_PROBE, executor.own_task())
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        executor.run(images, [_PROBE] * rows, 0)
        seconds.append(time.perf_counter() - begun)
    executor.remove_task(_PROBE)
    return rows / statistics.median(seconds)
