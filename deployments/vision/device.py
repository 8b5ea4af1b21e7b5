"""The executor of a vision transformer behind coroutines: one thread computes, batches before accuracies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.vision.accuracy import kept, measured
from pliant.deployments.vision.tasks import key
from pliant.formats.vision_task import TaskError, TaskInfo, TaskRef, read_task
from pliant.models.vision_info import VisionInfo

logger = logging.getLogger("pliant")

_READ_WITHIN_S = 60.0
_MEASURED_ROWS = 4
"""Images that accuracies are measured with at a time: a batch waits for no more of them."""
_PATIENCE_S = 1.0
"""For which measuring waits for a break between batches."""

_T = TypeVar("_T")


class Executor(Protocol):
    """As `pliant.kernels.vision.executor.VisionExecutor`. No two calls at a time, but for `stage`."""

    info: VisionInfo
    most_rows: int

    @property
    def backend(self) -> str: ...

    def stage(self, folder: Path) -> Any: ...

    def own_task(self) -> Any | None: ...

    def add_task(self, key: str, weights: Any) -> None: ...

    def remove_task(self, key: str) -> None: ...

    def room(self, rows: int) -> NDArray[np.uint8]: ...

    def run(self, images: NDArray[np.uint8], tasks: Sequence[str], gamma: int) -> Sequence[NDArray[np.float32]]: ...


class ExecutorDevice:
    """Runs batches, and loads tasks for them, with what of `gammas` they have prompts or need none for.

    `worker` has one thread, in which all is computed. `identity` names model and device: the accuracies that are
    measured on it are kept under this name. `own` are those of the model's own head, relative to gamma 0, and so those
    that are assumed of tasks whose accuracies with merged tokens nobody has measured.
    """

    def __init__(
        self,
        executor: Executor,
        worker: ThreadPoolExecutor,
        gammas: Sequence[int],
        identity: str,
        own: Mapping[int, float] | None = None,
    ) -> None:
        self._executor = executor
        self._gammas = gammas
        self._identity = identity
        self._own = own or {}
        self._worker = worker
        self._alone = asyncio.Lock()
        """Held while images are measured with."""
        self._free = asyncio.Event()
        """Set unless a batch is computed."""
        self._free.set()

    @property
    def backend(self) -> str:
        return self._executor.backend

    async def ready(self) -> None:
        """Wait until no images are measured with."""
        async with self._alone:
            pass

    async def run(self, images: Sequence[bytes], tasks: Sequence[str], gamma: int) -> Sequence[NDArray[np.float32]]:
        """The logits of each image, uint8 [height, width, channels] of the model's size."""
        self._free.clear()
        try:
            return await self._in_worker(lambda: self._executor.run(self._stacked(images), tasks, gamma))
        finally:
            self._free.set()

    async def load(self, task: TaskRef) -> Mapping[int, float]:
        """Bring `task` into memory: its accuracies by gamma. They are those that were measured here before, or else
        what its folder says and, where it says nothing of merged tokens, what is assumed. Raises TaskError, or whatever
        the executor does."""
        if task.is_own:
            return await self._load_own(task)
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                accuracies, weights = await asyncio.to_thread(self._staged, task)
        except TimeoutError:
            raise TaskError(f"task {task.name}: its folder could not be read in {_READ_WITHIN_S:g} s") from None
        await self._in_worker(lambda: self._executor.add_task(key(task), weights))
        return accuracies

    async def measure(self, task: TaskRef) -> Mapping[int, float] | None:
        """The accuracies of `task`, which is in memory, by gamma, if it has images for that: measured in between
        batches, or before. Raises TaskError, or ValueError when it leaves the memory meanwhile."""
        if task.is_own:
            return None
        loop = asyncio.get_running_loop()

        def run(images: NDArray[np.uint8], gamma: int) -> Sequence[NDArray[np.float32]]:
            names = [key(task)] * len(images)
            between = self._between_batches(lambda: self._executor.run(images, names, gamma))
            return asyncio.run_coroutine_threadsafe(between, loop).result()

        info = await asyncio.to_thread(self._read, task)
        if not info.profiling_images:
            return None
        rows = min(_MEASURED_ROWS, self._executor.most_rows)
        return await asyncio.to_thread(measured, info, self._usable(info), run, rows, self._identity)

    async def _load_own(self, task: TaskRef) -> Mapping[int, float]:
        weights = self._executor.own_task()
        if weights is None or not self._own:
            served = ", ".join(map(str, self._gammas))
            raise TaskError(f"task {task.name}: the model has no head of its own that runs with gammas {served}")
        await self._in_worker(lambda: self._executor.add_task(key(task), weights))
        return self._own

    async def unload(self, task: TaskRef) -> None:
        await self._in_worker(lambda: self._executor.remove_task(key(task)))

    def _read(self, task: TaskRef) -> TaskInfo:
        info = read_task(Path(task.folder), self._executor.info)
        if info.revision != task.revision:
            raise TaskError(f"task {task.name}: its folder has changed since it was registered; register it again")
        return info

    def _staged(self, task: TaskRef) -> tuple[Mapping[int, float], Any]:
        """Accuracies and weights of `task`."""
        info = self._read(task)
        accuracies = kept(info, self._usable(info), self._identity) or self._said(info)
        if not accuracies:
            served = ", ".join(map(str, self._gammas))
            raise TaskError(f"task {task.name}: its accuracy is known for none of the service's gammas, {served}")
        return accuracies, self._executor.stage(info.folder)

    def _usable(self, info: TaskInfo) -> list[int]:
        return [gamma for gamma in self._gammas if gamma <= 0 or gamma in info.prompts]

    def _said(self, info: TaskInfo) -> Mapping[int, float]:
        shares = {gamma: share for gamma, share in self._own.items() if gamma not in info.accuracies}
        assumed = {gamma: info.accuracies[0] * share for gamma, share in shares.items()}
        if assumed and not info.profiling_images:
            numbers = ", ".join(f"{accuracy:.3f} with gamma {gamma}" for gamma, accuracy in sorted(assumed.items()))
            text = "task %s: nothing tells how accurate it is with merged tokens, assumed is %s; profiling images would"
            logger.warning(text, info.name, numbers)
        known = {**assumed, **info.accuracies}
        return {gamma: known[gamma] for gamma in self._usable(info) if gamma in known}

    async def _between_batches(self, function: Callable[[], _T]) -> _T:
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not self._free.is_set():  # the next batch may have begun when this is told of the last one's end
                    await self._free.wait()
        async with self._alone:
            return await self._in_worker(function)

    def _stacked(self, images: Sequence[bytes]) -> NDArray[np.uint8]:
        room = self._executor.room(len(images))
        for place, image in zip(room, images, strict=True):
            place.ravel()[:] = np.frombuffer(image, np.uint8)
        return room

    async def _in_worker(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)
