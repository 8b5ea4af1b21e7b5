"""Processes of one event loop that die, stop and call each other late, by a seed; no thread has a say in it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from support.virtual_loop import VirtualLoop

from pliant.deployments.serving.errors import ReplicaLostError

T = TypeVar("T")

_process: ContextVar[Process | None] = ContextVar("process", default=None)


class SimulatedLoop(VirtualLoop):
    """Executors work in this thread, each after a time of `rng`; `time.sleep` is time that passes for everybody."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._turns: WeakKeyDictionary[Executor, asyncio.Lock] = WeakKeyDictionary()
        self._kept: set[asyncio.Task[Any]] = set()
        self._real = time.sleep, time.perf_counter
        time.sleep, time.perf_counter = self._pass, self.time
        self.set_task_factory(_task)

    def close(self) -> None:
        time.sleep, time.perf_counter = self._real
        super().close()

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        task = self.create_task(self._work(executor, func, args))
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    async def _work(self, executor: Any, func: Callable[..., T], args: tuple[Any, ...]) -> T:
        one_at_a_time = isinstance(executor, ThreadPoolExecutor) and executor._max_workers == 1
        lock = self._turns.setdefault(executor, asyncio.Lock()) if one_at_a_time else asyncio.Lock()
        async with lock:
            await asyncio.sleep(self._rng.random() * 0.01)
            return func(*args)

    def _pass(self, seconds: float) -> None:
        self._now += seconds


class Process:
    """What is started within `run` or `spawn`, and by that, is its own, and ends with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.death = asyncio.Event()
        self.runs = asyncio.Event()
        self.runs.set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self._context = copy_context()
        self._context.run(_process.set, self)

    @staticmethod
    def current() -> Process | None:
        """That of whoever asks."""
        return _process.get()

    def run(self, function: Callable[[], T]) -> T:
        return self._context.copy().run(function)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def kill(self) -> None:
        """SIGKILL: nothing of it goes on, and what it would still write or send is not."""
        self.dead = True
        self.runs.set()
        self.death.set()
        for task in list(self.tasks):
            task.cancel()


class Network:
    """Carries calls between processes: late, overtaken by later ones, and some of them twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.latest_s = 0.02
        """Of most calls, there and back; one in twenty takes up to fifty times as long."""

    async def call(
        self, source: Process, target: Process, work: Callable[[], Coroutine[Any, Any, T]], twice: bool
    ) -> T:
        """What `work` comes to in `target`; with `twice` it may be done once more, for nobody. Raises ReplicaLostError
        when the target dies before it answered."""
        await self._pass(source)
        if target.dead:
            raise ReplicaLostError(f"{target.name} is dead")
        await unless_dead(target, target.runs.wait())
        if twice and self._rng.random() < 0.05:
            target.spawn(self._again(work))
        found = await unless_dead(target, target.spawn(work()))
        await unless_dead(target, target.runs.wait())
        await self._pass(source)
        return found

    async def _again(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        await asyncio.sleep(self._rng.random())
        try:
            await work()
        except Exception:  # nobody hears of it
            return

    async def _pass(self, source: Process) -> None:
        slow = 50 if self._rng.random() < 0.05 else 1
        await asyncio.sleep(self._rng.random() * self.latest_s / 2 * slow)
        await source.runs.wait()


async def unless_dead(process: Process, work: Awaitable[T]) -> T:
    """What `work` comes to, while `process` lives; it is cancelled with the caller. Raises ReplicaLostError."""
    doing, death = asyncio.ensure_future(work), asyncio.ensure_future(process.death.wait())
    try:
        await asyncio.wait((doing, death), return_when=asyncio.FIRST_COMPLETED)
        if process.dead or not doing.done() or doing.cancelled():
            raise ReplicaLostError(f"{process.name} died")
        return doing.result()
    finally:
        doing.cancel()
        death.cancel()


def _task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None, **options: Any) -> Any:
    task = asyncio.Task(work, loop=loop, context=context, **options)
    process = context.get(_process) if context else _process.get()
    if process:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        if process.dead:
            task.cancel()
    return task
