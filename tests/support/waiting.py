"""Waiting without an opinion about how fast a machine is: a wait fails when nothing has changed for minutes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANGS_AFTER_S = 600.0
"""Without any change of what is looked at."""
_LOOKS_EVERY_S = 2.0
"""At the state, which may take long to find out."""
_STANDS_STILL_S = 10.0
"""Nothing is looked at for so long only where the whole machine stands still."""
PATIENT_MS = 1_000_000
"""An slo_ms that no machine misses."""
PROCESS_HANGS_AFTER_S = 3600.0
"""A process that works on its own, and says nothing before it is done."""


def wait_until(reached: Callable[[], T], state: Callable[[], object] = lambda: None) -> T:
    """What `reached` returns once it is true.

    It fails when neither has happened for HANGS_AFTER_S: that, or a change of `state`. A state that changes for ever,
    such as a counter under load, would make it wait for ever. For coroutines there is `until`, and in a thread this.
    """
    patience = _Patience(state)
    pause_s = 0.05
    while not (found := reached()):
        patience.check()
        time.sleep(pause_s)
        pause_s = min(0.5, 1.2 * pause_s)  # to look takes time that what is waited for may need
    return found


async def until(reached: Callable[[], T], state: Callable[[], object] = lambda: None) -> T:
    """`wait_until` for what goes on in the running event loop, or in threads of this process."""
    patience = _Patience(state)
    while not (found := reached()):
        patience.check()
        await asyncio.sleep(0.001)
    return found


class _Patience:
    def __init__(self, state: Callable[[], object]) -> None:
        self._state = state
        self._last = state()
        self._looked = time.monotonic()
        self._same_s = 0.0

    def check(self) -> None:
        """Fail if `state` has long been the same; a time for which the whole machine stood still is none."""
        now = time.monotonic()
        if now < self._looked + _LOOKS_EVERY_S:
            return
        state = self._state()
        self._same_s += min(now - self._looked, _STANDS_STILL_S)
        self._looked = now
        if state != self._last:
            self._last, self._same_s = state, 0.0
        elif self._same_s > HANGS_AFTER_S:
            raise AssertionError(f"for {HANGS_AFTER_S:.0f} s nothing has changed: {state}")
