"""An event loop whose time jumps to whatever happens next, so that hours pass in no time, and never vary.

Tests run in it that are marked `virtual_time`.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_TICK_S = 1e-9
"""However little is waited for, time goes on: what looks at it again and again comes to an end."""


class _Slept(threading.local):
    """What the thread has slept."""

    seconds = 0.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """While it is open, `time.monotonic` tells its time. What executors work on takes none, however long it takes, and
    when a thread sleeps, exactly that has passed on its `time.perf_counter`.

    Only for what waits for timers, executors and itself: not for other threads, sockets or processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._working = 0
        self._slept = _Slept()
        self._clocks = time.monotonic, time.perf_counter, time.sleep
        time.monotonic, time.perf_counter, time.sleep = self.time, self._counter, self._sleep

    def close(self) -> None:
        time.monotonic, time.perf_counter, time.sleep = self._clocks
        super().close()

    def _counter(self) -> float:
        return self._now + self._slept.seconds

    def _sleep(self, seconds: float) -> None:
        self._slept.seconds += seconds

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        self._working += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._worked)
        return future

    def _worked(self, _future: asyncio.Future[Any]) -> None:
        self._working -= 1

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:  # nothing happens then
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if not self._ready and timers and not self._working:  # type: ignore[attr-defined]
            self._now = max(self._now + _TICK_S, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


def run(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
