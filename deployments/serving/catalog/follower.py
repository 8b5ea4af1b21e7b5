"""The follower's side of a catalog: knows all that is registered there, and bears the planner's absence.

Plain asyncio, without Ray. The planner may be gone for as long as it likes: what is known goes on as it went.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Generic

from pliant.deployments.serving.catalog.catalog import Seen
from pliant.deployments.serving.messages import CatalogNews, Entry

logger = logging.getLogger("pliant")

_NEWS_WITHIN_S = 10.0
_CATCH_UP_WITHIN_S = 2.0
_RETRY_S = 1.0


class CatalogFollower(Generic[Entry]):
    """Keeps `known` in step with a catalog while `run` runs, or whenever `ask` is called.

    `news(me, seen, wait)` calls the planner, and may raise anything. `what` names the entries in logs.
    """

    def __init__(self, news: Callable[[str, Seen, bool], Awaitable[CatalogNews[Entry]]], what: str) -> None:
        self.known: dict[str, Entry] = {}
        """By name."""
        self.reached = True
        """Whether the planner answered when it was last asked."""
        self.problems: tuple[str, ...] = ()
        self._news = news
        self._what = what
        self._me = uuid.uuid4().hex
        self._seen: Seen = ("", -1)
        self._asking: asyncio.Task[bool] | None = None
        self._asks_next: asyncio.Task[bool] | None = None

    @property
    def informed(self) -> bool:
        """Whether the planner has ever answered."""
        return bool(self._seen[0])

    @property
    def away(self) -> str:
        """What the planner does while it does not answer."""
        return "the planner restarts" if self.informed else f"the planner reads the {self._what}, or trains the zoo's"

    @property
    def version(self) -> Seen:
        """Another one whenever `known` is."""
        return self._seen

    async def run(self) -> None:
        """Follow the catalog for ever."""
        while True:
            if not await self.ask(wait=True, within_s=_NEWS_WITHIN_S):
                await asyncio.sleep(_RETRY_S)

    async def catch_up(self) -> bool:
        """Whether all that was registered when this was called is known now.

        One call to the planner serves all who ask before it begins, so that wrong names, however many, are no burden.
        """
        if self._asks_next is None:
            self._asks_next = asyncio.create_task(self._ask_after(self._asking))
        return await asyncio.shield(self._asks_next)

    async def ask(self, wait: bool, within_s: float) -> bool:
        """Whether the planner answered; `wait`: not before there is something new, or some seconds have passed."""
        seen = self._seen
        try:
            async with asyncio.timeout(within_s):
                news = await self._news(self._me, seen, wait)
        except Exception as error:
            if self.reached:
                logger.warning("the planner cannot be reached; %s stay as they are: %r", self._what, error)
            self.reached = False
            return False
        self.reached = True
        self._take(news, seen)
        return True

    async def _ask_after(self, before: asyncio.Task[bool] | None) -> bool:
        if before:
            await asyncio.wait([before])
        self._asking, self._asks_next = self._asks_next, None
        return await self.ask(wait=False, within_s=_CATCH_UP_WITHIN_S)

    def _take(self, news: CatalogNews[Entry], asked: Seen) -> None:
        """Make `news`, which were `asked` for with what was seen then, known, unless newer ones have been already: two
        calls may be under way, and one of them at a planner that stopped and has been replaced."""
        life, version = self._seen
        if news.version <= version if news.life == life else not news.whole or asked[0] != life:
            return
        known = {} if news.whole else self.known
        for name, entry in news.changes.items():
            if entry is not None:
                known[name] = entry
            else:
                known.pop(name, None)
        self.known, self._seen, self.problems = known, (news.life, news.version), news.problems
