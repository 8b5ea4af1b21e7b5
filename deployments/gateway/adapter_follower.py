"""The gateway's side of the registry of adapters: know all of them, and change it for clients.

Plain asyncio, without Ray. The planner may be gone for as long as it likes: adapters that are known go on as they went.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Protocol

from pliant.deployments.gateway.errors import RequestError
from pliant.deployments.gateway.openai_errors import OpenAIError
from pliant.deployments.planner.messages import AdapterNews, Registered, Rejected

logger = logging.getLogger("pliant")

_NEWS_WITHIN_S = 10.0
_CATCH_UP_WITHIN_S = 2.0
_CHANGE_WITHIN_S = 15.0
_RETRY_S = 1.0
_COME_BACK_S = 5.0


class Registry(Protocol):
    """Calls to the planner. Any may raise anything: it may be gone."""

    async def adapter_news(self, gateway: str, seen: tuple[str, int], wait: bool) -> AdapterNews: ...

    async def load_adapter(
        self, name: str, path: str, service: str | None, in_place: bool
    ) -> Registered | Rejected: ...

    async def unload_adapter(self, name: str) -> Registered | Rejected: ...


class AdapterFollower:
    """Keeps `known` in step with the registry while `run` runs."""

    def __init__(self, registry: Registry) -> None:
        self.known: dict[str, Registered] = {}
        """The adapters by name."""
        self._registry = registry
        self._gateway = uuid.uuid4().hex
        self._seen = ("", -1)
        self._reached = True
        self._problems: tuple[str, ...] = ()
        self._asking: asyncio.Task[bool] | None = None
        self._asks_next: asyncio.Task[bool] | None = None

    @property
    def version(self) -> tuple[str, int]:
        """Another one whenever `known` is."""
        return self._seen

    async def run(self) -> None:
        """Follow the registry for ever."""
        while True:
            if not await self._ask(wait=True, within_s=_NEWS_WITHIN_S):
                await asyncio.sleep(_RETRY_S)

    async def find(self, name: str) -> Registered | None:
        """The adapter that is called so; one that is not known may be news, so the registry is asked.

        Raises RequestError 503 when it does not answer.
        """
        if name not in self.known and not await self._catch_up():
            reason = f"whether there is an adapter {name[:200]!r} cannot be said, as the planner restarts; retry later"
            raise RequestError(503, reason, _COME_BACK_S)
        return self.known.get(name)

    async def load(self, name: str, path: str, service: str | None, in_place: bool) -> Registered:
        """Load an adapter for all gateways and replicas.

        Those that do not hear of it in time, perhaps this one, ask when they are given its name, as `find` does. Raises
        OpenAIError, or RequestError 503.
        """
        return await self._change(self._registry.load_adapter(name, path, service, in_place))

    async def unload(self, name: str) -> Registered:
        """Unload an adapter everywhere; gateways that do not hear of it in time, perhaps this one, do so a bit later.

        Raises OpenAIError, or RequestError 503.
        """
        return await self._change(self._registry.unload_adapter(name))

    def facts(self) -> dict[str, Any]:
        """For people and Prometheus."""
        return {
            "registered": dict(Counter(entry.service for entry in self.known.values())),
            "planner_reached": self._reached,
            "problems": list(self._problems),
        }

    async def _change(self, change: Coroutine[Any, Any, Registered | Rejected]) -> Registered:
        try:
            async with asyncio.timeout(_CHANGE_WITHIN_S):
                outcome = await change
        except Exception as error:
            logger.warning("an adapter could not be changed: %r", error)
            reason = "the planner, which keeps the adapters, does not answer; see /v1/models for what became of this"
            raise RequestError(503, reason, _COME_BACK_S) from None
        if isinstance(outcome, Rejected):
            if outcome.status in (429, 503):
                raise RequestError(outcome.status, outcome.reason, _COME_BACK_S)
            raise OpenAIError(outcome.status, outcome.reason, outcome.param)
        await self._catch_up()  # or else `run` hears of it
        return outcome

    async def _catch_up(self) -> bool:
        """Whether all that was registered when this was called is known now.

        One call to the registry serves all who ask before it begins, so that wrong names, however many, are no burden.
        """
        if self._asks_next is None:
            self._asks_next = asyncio.create_task(self._ask_after(self._asking))
        return await asyncio.shield(self._asks_next)

    async def _ask_after(self, before: asyncio.Task[bool] | None) -> bool:
        if before:
            await asyncio.wait([before])
        self._asking, self._asks_next = self._asks_next, None
        return await self._ask(wait=False, within_s=_CATCH_UP_WITHIN_S)

    async def _ask(self, wait: bool, within_s: float) -> bool:
        """Whether the registry answered."""
        try:
            async with asyncio.timeout(within_s):
                news = await self._registry.adapter_news(self._gateway, self._seen, wait)
        except Exception as error:
            if self._reached:
                logger.warning("the planner cannot be reached; adapters stay as they are: %r", error)
            self._reached = False
            return False
        self._reached = True
        self._take(news)
        return True

    def _take(self, news: AdapterNews) -> None:
        """Make `news` known, unless newer ones have been already: two calls may be under way."""
        life, version = self._seen
        if news.version <= version if news.life == life else not news.whole:
            return
        known = {} if news.whole else self.known
        for name, entry in news.changes.items():
            if entry is not None:
                known[name] = entry
            else:
                known.pop(name, None)
        self.known, self._seen, self._problems = known, (news.life, news.version), news.problems
