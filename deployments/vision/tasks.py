"""Which tasks a replica has in memory, for as long as images need them (OTAS §III-A).

Tasks are brought when they are registered, or else by the first image that names them. The least recently used go when
there are too many. What can be measured of a task is measured while it is in use already.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.formats.vision_task import TaskError, TaskRef

logger = logging.getLogger("pliant")

_MOST, _MOST_BYTES = 256, 2**30
_RETRY_S = 5.0
"""After which a task that could not be loaded is tried again."""


def key(task: TaskRef) -> str:
    """What the device calls `task`."""
    return f"{task.key} {task.folder}"


class TaskLoader(Protocol):
    """What brings tasks into memory and out of it."""

    async def load(self, task: TaskRef) -> Mapping[int, float]:
        """Its accuracies by gamma, for each under which it can be run. May raise anything."""

    async def unload(self, task: TaskRef) -> None: ...


Measure = Callable[[TaskRef], Awaitable[Mapping[int, float] | None]]


class Tasks:
    """The tasks in memory, `most` at a time, of `most_bytes` in all; `size` says how many a task takes.

    `measure` tells a task's accuracies better than loading it does, or None if it cannot; it may take its time, and
    raise anything.
    """

    def __init__(
        self,
        loader: TaskLoader,
        most: int = _MOST,
        measure: Measure | None = None,
        size: Callable[[TaskRef], int] = lambda _task: 0,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._loader = loader
        self._size = size
        self._most_bytes = most_bytes
        self._measure = measure
        self.most = most
        self.version = 0
        """Another one whenever other tasks are in memory."""
        self._held: dict[TaskRef, Mapping[int, float]] = {}
        """With accuracies by gamma; the least recently used first."""
        self._accuracies: dict[str, Mapping[int, float]] = {}
        self._users: Counter[TaskRef] = Counter()
        self._loads: dict[TaskRef, asyncio.Task[None]] = {}
        self._failed: dict[TaskRef, tuple[float, str]] = {}
        """Until when, and why: an error that is raised again and again would hold on to all that got it."""
        self._leaving: set[TaskRef] = set()
        """Those that images still need, and that are not registered any more."""
        self._moving = asyncio.Lock()
        self._measuring = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()

    def accuracy(self, name: object, gamma: int) -> float | None:
        """Of the task with this key, on images that training has not seen; None if it cannot be run under `gamma`."""
        return self._accuracies.get(str(name), {}).get(gamma)

    def accuracies(self, gammas: Sequence[int]) -> NDArray[np.float64]:
        """Of all tasks in memory, [task, gamma]; NaN where `accuracy` is None."""
        known = [[each.get(gamma, np.nan) for gamma in gammas] for each in self._accuracies.values()]
        return np.array(known, np.float64).reshape(-1, len(gammas))

    def __contains__(self, task: TaskRef) -> bool:
        return task in self._held

    def names(self) -> list[str]:
        return [task.name for task in self._held]

    async def acquire(self, task: TaskRef) -> None:
        """Have `task` in memory until it is released. Raises TaskError; then, and when cancelled, it is not held."""
        self._users[task] += 1
        try:
            if task not in self._held:
                await asyncio.shield(self._load(task))
        except BaseException:
            self.release(task)
            raise

    def release(self, task: TaskRef) -> None:
        """`task`, once acquired, may leave the memory if nobody else needs it."""
        self._users[task] -= 1
        if not self._users[task]:
            del self._users[task]
            if task in self._leaving:
                self._in_background(self.forget(task))
        if task in self._held:
            self._held[task] = self._held.pop(task)

    async def forget(self, task: TaskRef) -> None:
        """`task` is not registered any more: it leaves the memory as soon as no image needs it."""
        async with self._moving:
            if task in self._held and not self._users[task]:
                await self._remove(task)
            elif task in self._held:
                self._leaving.add(task)

    async def measured(self) -> None:
        """Wait until what can be measured of tasks in memory has been."""
        while self._background:
            await asyncio.wait(self._background)

    def _load(self, task: TaskRef) -> asyncio.Task[None]:
        """The one load of `task` that is under way."""
        if task not in self._loads:
            load = asyncio.create_task(self._bring(task))
            load.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have left
            self._loads[task] = load
        return self._loads[task]

    async def _bring(self, task: TaskRef) -> None:
        try:
            self._check_worth_trying(task)
            async with self._moving:
                await self._make_room(task)
                accuracies = await self._loaded(task)
            self._held[task] = self._accuracies[key(task)] = accuracies
            self.version += 1
        finally:
            del self._loads[task]
        if self._measure:
            self._in_background(self._improve(task, self._measure))

    async def _loaded(self, task: TaskRef) -> Mapping[int, float]:
        try:
            return await self._loader.load(task)
        except Exception as error:
            explained = isinstance(error, TaskError)
            reason = str(error) if explained else f"task {task.name}: cannot be loaded: {type(error).__name__}: {error}"
            self._failed[task] = asyncio.get_running_loop().time() + _RETRY_S, reason
            raise TaskError(reason) from None

    async def _improve(self, task: TaskRef, measure: Measure) -> None:
        async with self._measuring:
            if task not in self._held:
                return
            try:
                found = await measure(task)
            except Exception as error:
                if task in self._held:
                    logger.warning("task %s: accuracies cannot be measured, and are assumed: %r", task.name, error)
                return
        if found is not None and task in self._held:
            self._held[task] = self._accuracies[key(task)] = found
            self.version += 1

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        doing = asyncio.create_task(work)
        self._background.add(doing)
        doing.add_done_callback(self._background.discard)

    def _check_worth_trying(self, task: TaskRef) -> None:
        now = asyncio.get_running_loop().time()
        self._failed = {each: failed for each, failed in self._failed.items() if now < failed[0]}
        if task in self._failed:
            raise TaskError(self._failed[task][1])

    async def _make_room(self, wanted: TaskRef) -> None:
        room = self._most_bytes - self._size(wanted)
        if room < 0:
            given = f"takes {self._size(wanted):,} bytes, for at most {self._most_bytes:,} of all tasks in a replica"
            raise TaskError(f"task {wanted.name}: {given}; give it fewer labels or prompts")
        while len(self._held) >= self.most or sum(map(self._size, self._held)) > room:
            idle = next((task for task in self._held if not self._users[task]), None)
            if idle is None:
                raise TaskError(f"{len(self._held)} tasks are in use, as many as a replica holds; retry later")
            await self._remove(idle)

    async def _remove(self, task: TaskRef) -> None:
        del self._held[task], self._accuracies[key(task)]
        self._leaving.discard(task)
        self.version += 1
        try:
            await self._loader.unload(task)
        except Exception:
            logger.exception("task %s cannot be unloaded", task.name)


class TaskReconciler:
    """Brings registered tasks before images need them, and removes those that are not registered any more."""

    def __init__(self, service: str, tasks: Tasks) -> None:
        self._service = service
        self._tasks = tasks
        self._known: set[TaskRef] = set()
        self._failed: dict[TaskRef, str] = {}

    @property
    def failed(self) -> Mapping[TaskRef, str]:
        """Registered tasks that could not be loaded, and why."""
        return {task: reason for task, reason in self._failed.items() if task not in self._tasks}

    async def reconcile(self, registered: Iterable[TaskRef]) -> None:
        """From now on these are registered, and no others. One that cannot be loaded is logged, and not tried again
        until it is registered anew, or an image needs it. What takes another's place is there before that one goes."""
        now = list(dict.fromkeys(registered))
        for task in now[: self._tasks.most]:
            if task not in self._known:
                await self._bring(task)
        for task in self._known - set(now):
            self._failed.pop(task, None)
            await self._tasks.forget(task)
        self._known = set(now)

    async def _bring(self, task: TaskRef) -> None:
        try:
            await self._tasks.acquire(task)
        except TaskError as error:
            logger.error("%s: %s", self._service, error)
            self._failed[task] = str(error)
        else:
            self._tasks.release(task)
