"""Has a replica's runtimes compiled in the background, and the engine take over each as soon as it is there.

A replica answers with the uncompiled model at once. Compiling takes seconds to minutes a length and is done once per
machine, by whichever replica gets its turn first; all of them want all lengths, as the planner may tell them to hold
any. Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from pliant.deployments.encoder.engine import Engine, Runtimes
from pliant.errors import CannotCompileError

logger = logging.getLogger("pliant")


@runtime_checkable
class CompiledLater(Runtimes, Protocol):
    """Runtimes that are compiled while others serve. `settle_lengths` and `compile` block; they run in a thread."""

    def missing(self) -> set[int]:
        """Of `lengths`, those that are to be compiled and are not yet."""

    def settle_lengths(self) -> None:
        """Find out which `lengths` there should be, where that has to be measured."""

    def compile(self, max_length: int, urgency: Callable[[], float]) -> None:
        """Make `load(max_length)` give a compiled runtime. Of what waits to be compiled, the least urgency is next.

        Raises CannotCompileError.
        """


class Upgrades:
    """Compiles what `engine` may hold, the length that it used most first."""

    def __init__(self, service: str, engine: Engine, runtimes: CompiledLater) -> None:
        self._service = service
        self._engine = engine
        self._runtimes = runtimes
        self._more = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiling")
        engine.compiling |= runtimes.missing()

    def look(self) -> None:
        """See whether the replica may hold lengths by now that are to be compiled, too."""
        self._engine.compiling |= self._runtimes.missing() - self._engine.uncompiled.keys()
        self._more.set()

    async def run(self) -> None:
        """Compile what is missing, for ever: first what there is to be until it is measured, which takes longer."""
        await self._compile_all()
        self._engine.compiling |= set(self._runtimes.lengths)
        try:
            await self._in_thread(self._runtimes.settle_lengths)
        except Exception:
            logger.exception("%s: its lengths stay %s", self._service, self._runtimes.lengths)
        self._engine.compiling.clear()
        self.look()
        while True:
            self._more.clear()
            await self._compile_all()
            await self._more.wait()

    async def _compile_all(self) -> None:
        while self._engine.compiling:
            await self._compile(max(self._engine.compiling, key=self._use))

    async def _compile(self, length: int) -> None:
        try:
            await self._in_thread(lambda: self._runtimes.compile(length, lambda: -self._use(length)))
            await self._engine.renew(length)
        except CannotCompileError as reason:
            self._stays_uncompiled(length, str(reason))
        except Exception as error:
            logger.exception("%s: cannot take over the compiled runtime for %d tokens", self._service, length)
            self._stays_uncompiled(length, f"{length} tokens: {error!r}")
        finally:
            self._engine.compiling.discard(length)

    def _stays_uncompiled(self, length: int, reason: str) -> None:
        if reason not in self._engine.uncompiled.values():
            logger.warning("%s: %s", self._service, reason)
        self._engine.uncompiled[length] = reason

    def _use(self, length: int) -> int:
        """How many answers the length gave here; what is held comes before others that gave as many."""
        return 2 * self._engine.uses[length] + (self._engine.home == length)

    async def _in_thread(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function)
