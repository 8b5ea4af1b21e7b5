"""Runs an engine in a thread, and brings what it computes to coroutines.

The thread steps while there is something to do, and sleeps otherwise, for as long as the engine lets it. It takes new
and cancelled requests between two steps, and hands over all that a step gave in one call into the event loop. A
consumer that looks away finds everything new in one piece, so that a slow client costs less, not more.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from itertools import count

from pliant.deployments.http.grammars import threads
from pliant.deployments.llm.engine import BrokenError, Engine, Item
from pliant.deployments.llm.guide import Guide
from pliant.deployments.llm.report import LlmReport
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.policies.llm.decode_admission import QueueFullError

_RETRY_S = 1.0
_JOIN_S = 5.0
_SIGN_S = 2.0
"""Between signs of life."""


class StandstillError(Exception):
    """Nothing was computed for a request for as long as it waits at most."""


class _Inbox:
    """What has come for one request and was not consumed: pieces, and then perhaps an error."""

    __slots__ = ("arrived", "error", "pieces", "progress", "queued_until", "until")

    def __init__(self, until: float, queued_until: float) -> None:
        self.pieces: list[Piece] = []
        self.error: Exception | None = None
        self.arrived = asyncio.Event()
        self.until = until
        """When it stands still, unless something is computed for it."""
        self.queued_until = queued_until
        """When it has waited for its slot for too long."""
        self.progress: int | None = 0
        """As the engine last told it."""


class EngineLoop:
    """An engine, its thread, and the requests of one event loop, from which all methods are called.

    A request is ended for which nothing is computed for `wait_s` seconds, and so is a load of an adapter. To wait for a
    slot is no standstill: who has a deadline waits until then, and who goes on or is in the background for as long as
    the gateway wants; others had better be sent elsewhere after `wait_s`. The thread starts at once, and ends with
    `close`.
    """

    def __init__(self, engine: Engine, wait_s: float = 60.0) -> None:
        engine.limit_loads(wait_s)
        self._engine = engine
        self._wait_s = wait_s
        self._loop = asyncio.get_running_loop()
        self._inboxes: dict[str, _Inbox] = {}
        self._keys = count()
        self._commands: deque[tuple[Generation, Guide | None] | str] = deque()
        """For the thread, to take between two steps: requests to add, and ids to cancel."""
        self._wake = threading.Event()
        self._closed = False
        self._stepping_since: float | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece | None, None]:
        """The pieces of one answer as they come; the last says how it finished. None is a sign of life: there is
        nothing new for some seconds, but the engine steps.

        Raises what `Engine.add` does, BusyError and AdapterLoadError while it waits, GuideError, BrokenError when the
        executor fails, and StandstillError. Closing or cancelling it before its end frees its slot for the next step.
        """
        if self.failure or self._closed:
            raise _broken(self.failure)
        if len(self._commands) >= self._engine.capacity:
            raise QueueFullError(f"{len(self._commands)} requests have come during one step", _RETRY_S)
        bound = generation.grammar or generation.bad_words
        guide = None
        if bound:
            making = asyncio.get_running_loop().run_in_executor(threads(), self._engine.guide, generation)
            try:
                while not (await asyncio.wait({making}, timeout=_SIGN_S))[0]:
                    yield None
                guide = making.result()
            finally:
                making.cancel()
        # The engine knows it by a name of its own: one that is sent again must not get what is left of the first.
        key = f"{generation.id} {next(self._keys)}"
        within_s = generation.first_token_within_s
        waits_on = within_s is not None or generation.background or generation.generated
        until = time.monotonic() + self._wait_s
        inbox = self._inboxes[key] = _Inbox(until, math.inf if waits_on else until)
        self._command((generation._replace(id=key), guide))
        finished = False
        try:
            while not finished:
                if not await self._arrival(key, inbox):
                    yield None
                    continue
                if not inbox.pieces and inbox.error:
                    raise inbox.error
                piece, inbox.pieces = merged(inbox.pieces), []
                finished = piece.finish is not None
                yield piece
                inbox.until = time.monotonic() + self._wait_s
        finally:
            del self._inboxes[key]
            if not (finished or inbox.error):
                self._command(key)

    async def _arrival(self, key: str, inbox: _Inbox) -> bool:
        """Whether something came; if not, the engine steps all the same. Raises StandstillError and QueueFullError."""
        while not (inbox.pieces or inbox.error):
            inbox.arrived.clear()
            try:
                async with asyncio.timeout(min(_SIGN_S, inbox.until - time.monotonic())):
                    await inbox.arrived.wait()
            except TimeoutError:
                if self.stepping_s() < min(_SIGN_S, self._wait_s):
                    self._look_after(key, inbox)
                if time.monotonic() >= inbox.until:
                    reason = f"nothing was computed for this request in {self._wait_s:g} s"
                    raise StandstillError(reason) from None
                if self.stepping_s() < _SIGN_S:
                    return False
        return True

    def _look_after(self, key: str, inbox: _Inbox) -> None:
        """While it waits for a slot, and while its prompt is computed, a request does not stand still."""
        before, inbox.progress = inbox.progress, self._engine.progress(key)
        now = time.monotonic()
        if inbox.progress is None and now >= inbox.queued_until and not self.loading_s():
            raise QueueFullError(f"no slot was free for {self._wait_s:g} s", _RETRY_S)
        if inbox.progress is None or inbox.progress != before:
            inbox.until = now + self._wait_s

    def report(self) -> LlmReport:
        return self._engine.report()

    @property
    def failure(self) -> Exception | None:
        """Why nothing is computed any more, if that is so."""
        return self._engine.failure or self._failure

    def stepping_s(self) -> float:
        """Seconds that the step under way has taken; 0 when none is."""
        since = self._stepping_since
        return 0.0 if since is None else time.monotonic() - since

    def loading_s(self) -> float:
        """Seconds that the load of an adapter under way has taken; 0 when none is."""
        return self._engine.loading_s()

    def close(self) -> None:
        """End the thread after the step under way; requests that are left get a BrokenError."""
        self._closed = True
        self._wake.set()
        self._thread.join(_JOIN_S)
        self._engine.close()

    def _command(self, command: tuple[Generation, Guide | None] | str) -> None:
        self._commands.append(command)
        self._wake.set()

    def _deliver(self, items: list[Item]) -> None:
        for key, item in items:
            inbox = self._inboxes.get(key)
            if inbox is None:
                continue
            if isinstance(item, Piece):
                inbox.pieces.append(item)
            else:
                inbox.error = item
            inbox.arrived.set()

    def _fail(self) -> None:
        """Nothing more will come for anyone."""
        for inbox in self._inboxes.values():
            inbox.error = inbox.error or _broken(self.failure)
            inbox.arrived.set()

    # In the thread:

    def _run(self) -> None:
        looks = False
        try:
            while not self._closed:
                items = self._obey()
                if looks or self._engine.busy:
                    self._stepping_since = time.monotonic()
                    items += self._engine.step()
                    self._stepping_since = None
                if items:
                    self._loop.call_soon_threadsafe(self._deliver, items)
                looks = False
                if not (self._engine.busy or self._commands):
                    looks = not self._wake.wait(self._engine.looks_every_s)
                    self._wake.clear()
        except Exception as failure:
            self._failure = failure
        finally:
            self._stepping_since = None
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._fail)

    def _obey(self) -> list[Item]:
        """Add and cancel what was asked for; the requests that were refused."""
        refused: list[Item] = []
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, str):
                self._engine.cancel(command)
                continue
            generation, guide = command
            try:
                self._engine.add(generation, guide)
            except Exception as error:
                refused.append((generation.id, error))
        return refused


def _broken(failure: Exception | None) -> BrokenError:
    return BrokenError(f"the engine has failed: {failure}" if failure else "the engine was closed")
