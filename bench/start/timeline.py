"""Asks every service of a cluster that is starting until it answers, and notes when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pliant.bench.load import LoadError, session
from pliant.bench.ray_session import Running
from pliant.bench.start.questions import Question

_LEAST_PAUSE_S = 0.1
_PAUSE_SHARE = 0.02
"""Of the time since the start: between two requests to a service, so that asking costs the cluster little."""
_ANSWERS_WITHIN_S = 60
_STUCK_AFTER_S = 600.0
_LONGEST_S = 3600.0
_CHECK_EVERY_S = 5.0


@dataclass(frozen=True)
class Timeline:
    """Seconds from when the process was started."""

    answered: Mapping[str, float]
    """Until its first 200, by service."""
    ready: float
    """Until all have answered and the cluster, asked then, says that it is ready."""

    @property
    def first(self) -> float:
        """Until the first service answered."""
        return min(self.answered.values())


class Advance:
    """Notices that nothing has changed for ten minutes, or that an hour is over."""

    def __init__(self) -> None:
        self._state: object = None
        self._since = 0.0

    def problem(self, seconds: float, state: object) -> str | None:
        """Why to give up, `seconds` after the start, if `state` is how far it is now."""
        if state != self._state:
            self._state, self._since = state, seconds
        if seconds - self._since > _STUCK_AFTER_S:
            return f"it made no progress for {_STUCK_AFTER_S:.0f} s"
        return f"it took more than {_LONGEST_S:.0f} s" if seconds > _LONGEST_S else None


async def watch(
    started: Running, address: str, questions: Mapping[str, Question], health: Question, cache: Path
) -> Timeline:
    """Ask all `questions` until they are answered, and then `health`.

    Progress is another answer, more in the log or below `cache`, or other words of `health`. Raises LoadError with the
    log's end if the process ends, or makes no progress.
    """
    answered: dict[str, float] = {}

    async def ask(http: aiohttp.ClientSession, name: str, question: Question) -> None:
        answered[name] = await _answered(http, address, question, started)

    try:
        async with session() as http, asyncio.TaskGroup() as group:
            guard = group.create_task(_guard(http, f"{address}{health.path}", started, answered, cache))
            await asyncio.wait([group.create_task(ask(http, name, question)) for name, question in questions.items()])
            ready = await _answered(http, address, health, started)
            guard.cancel()
    except* LoadError as failed:
        raise failed.exceptions[0] from None
    return Timeline({name: answered[name] for name in questions}, ready)


async def _answered(http: aiohttp.ClientSession, address: str, question: Question, started: Running) -> float:
    """Seconds from the start until the first 200."""
    method = "POST" if question.body else "GET"
    headers = {"Content-Type": "application/json"}
    limit = aiohttp.ClientTimeout(total=_ANSWERS_WITHIN_S)
    while True:
        try:
            url = f"{address}{question.path}"
            async with http.request(method, url, data=question.body, headers=headers, timeout=limit) as response:
                await response.read()
                if response.status == 200:
                    return started.seconds()
        except (aiohttp.ClientError, TimeoutError):
            pass
        await asyncio.sleep(max(_LEAST_PAUSE_S, _PAUSE_SHARE * started.seconds()))


async def _guard(
    http: aiohttp.ClientSession, health: str, started: Running, answered: Mapping[str, float], cache: Path
) -> None:
    """Raise LoadError once there is nothing to wait for."""
    advance = Advance()
    while True:
        state = (len(answered), started.log.stat().st_size, _size(cache), await _words(http, health))
        problem = advance.problem(started.seconds(), state)
        if started.process.poll() is not None:
            problem = f"it ended with exit status {started.process.returncode}"
        if problem:
            have = ", ".join(answered) or "nothing"
            raise LoadError(f"{problem}; {have} had answered. The end of its log:\n{started.tail()}")
        await asyncio.sleep(_CHECK_EVERY_S)


async def _words(http: aiohttp.ClientSession, url: str) -> str:
    """What a page says now; nothing, if it does not answer."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=_CHECK_EVERY_S)) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return ""


def _size(folder: Path) -> int:
    """Bytes of all files below it."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
            total += path.stat().st_size
    return total
