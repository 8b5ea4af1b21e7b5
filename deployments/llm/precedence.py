"""Answers in the background: those for which nobody waits are computed while a replica has no others.

One of these that is on its way makes way for whoever comes, and goes on later behind the tokens that it has, as an
answer does whose replica died.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pliant.deployments.llm.request import Generation, Piece

Pieces = AsyncGenerator[Piece | None, None]
"""Of one answer; None is a sign of life."""

_QUIET_S = 0.1
"""How long there must have been nobody: clients that ask one thing after another leave shorter gaps."""
_SIGN_S = 2.0
"""Between signs of life."""


class Precedence:
    """Has `generate`, an engine's, compute answers."""

    def __init__(self, generate: Callable[[Generation], Pieces]) -> None:
        self._generate = generate
        self._live = 0
        """Answers under way that somebody waits for."""
        self._idle = asyncio.Event()
        """Whether there are none."""
        self._idle.set()
        self._quiet_at = 0.0
        """When there will have been none for long enough, if none comes."""
        self._pumps: set[asyncio.Task[None]] = set()
        """Of the others, those that the engine has."""

    async def generate(self, generation: Generation) -> Pieces:
        """As the engine does it, in the background if `generation` is."""
        if generation.background:
            async with aclosing(self._in_background(generation)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        self._live += 1
        self._idle.clear()
        try:
            if self._pumps:
                for pump in self._pumps:
                    pump.cancel()
                await asyncio.wait(self._pumps)  # for some turns of the event loop
            async with aclosing(self._generate(generation)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._live -= 1
            if not self._live:
                self._quiet_at = time.monotonic() + _QUIET_S
                self._idle.set()

    async def _in_background(self, generation: Generation) -> Pieces:
        received = list(generation.generated)
        while True:
            while not await self._quiet():
                yield None
            async with aclosing(self._until_live(generation._replace(generated=tuple(received)))) as pieces:
                async for piece in pieces:
                    yield piece
                    if piece:
                        received += piece.tokens
                        if piece.finish:
                            return

    async def _quiet(self) -> bool:
        """Wait until there is nobody; False if that takes long."""
        try:
            async with asyncio.timeout(_SIGN_S):
                while self._live or time.monotonic() < self._quiet_at:
                    await self._idle.wait()
                    await asyncio.sleep(max(0.0, self._quiet_at - time.monotonic()))
        except TimeoutError:
            return False
        return True

    async def _until_live(self, generation: Generation) -> Pieces:
        """The pieces of one answer until somebody comes, whether they are read or not."""
        come: asyncio.Queue[Piece | asyncio.Task[None] | None] = asyncio.Queue()

        async def pump() -> None:
            async with aclosing(self._generate(generation)) as pieces:
                async for piece in pieces:
                    come.put_nowait(piece)

        task = asyncio.create_task(pump())
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        task.add_done_callback(come.put_nowait)
        try:
            while not isinstance(piece := await come.get(), asyncio.Task):
                yield piece
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
