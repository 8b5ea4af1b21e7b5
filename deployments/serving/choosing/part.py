"""Has each service of a kind measured through its parts' own replicas, once, and tells gateways what serves.

Plain asyncio, without Ray. What was measured is kept in the cache, and in a `state` of several nodes, so that the next
planner reads it. While it is measured, and when it cannot be, all other services go on; the parts answer their own
clients beside it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from pliant.config.base import ServiceConfig
from pliant.deployments.serving.catalog.catalog import Catalog, Seen
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.choosing.shared import SharedProfiles
from pliant.deployments.serving.kind import Part, Planning
from pliant.deployments.serving.messages import CatalogNews
from pliant.deployments.serving.state.storage import storage
from pliant.errors import DataError, PliantError

logger = logging.getLogger("pliant")

C = TypeVar("C", bound=ServiceConfig)
P = TypeVar("P")

_GONE_S = 45.0
_NEWS_WITHIN_S = 5.0
_WAIT_S = 0.2
_WAKES_S = 0.5
PAUSES_S = (30.0, 600.0)
_LOOK_S = 600.0
"""After so long the labelled data are looked at again, so that a service is measured anew at most so often."""
_STEP = 0.05
"""Share of a profile after which gateways hear again how far it is."""


class RefusedError(Exception):
    """Nothing can serve before the operator does something about it; `problem` says what, for them."""

    def __init__(self, state: str, problem: str) -> None:
        super().__init__(problem)
        self.state = state
        self.problem = problem


class ChoosingPart(Part, Generic[C]):
    """A kind's part of the planner; `catalog` has its services by name.

    A service chooses as soon as its parts can answer, again when they do so faster than then, and again when its
    labelled data are replaced, or only some of them matter now; the earlier choice serves meanwhile. What fails is
    tried again for ever, after the first of `pauses_s`, which doubles up to the second. What was refused is looked at
    again after the second: a file may have been mended, or a profile removed; and as soon as its parts have settled,
    if they had not. `kept` names the folder of profiles in the cache, and `files` what is in each.
    """

    def __init__(
        self,
        planning: Planning,
        kind: type[C],
        kept: str,
        files: Sequence[str],
        pauses_s: tuple[float, float] = PAUSES_S,
    ) -> None:
        self.catalog: Catalog[Chosen] = Catalog(_GONE_S)
        self._planning = planning
        self._pauses_s = pauses_s
        state = planning.config.state
        self._shared = SharedProfiles(storage(state), kept, files) if state else None
        """None where the state is in the cache folder, as the profiles are."""
        self._profiling = asyncio.Lock()
        self._useless: dict[Path, str] = {}
        """Profiles that could not be made of these data, and why."""
        self._complaints: dict[str, str | None] = {}
        """By service, what the log was last told to be wrong."""
        self._tasks = [
            asyncio.create_task(self._start(name, config)) for name, config in planning.config.of(kind).items()
        ]

    @abstractmethod
    async def _choose(self, name: str, config: C, parts: Mapping[str, Any], provisional: bool) -> Any:
        """The choice, by what `parts`, which are ready, say; whether that soon changes.

        Raises DataError for data of which nothing can be told, and RefusedError where nothing is good enough.
        """

    @abstractmethod
    def _told(self, name: str, choice: Any) -> str:
        """What serves, for people."""

    @abstractmethod
    async def _others(self, name: str, config: C) -> bool:
        """Whether the labelled data to measure it on are not those that it was measured on. Raises DataError."""

    @abstractmethod
    async def _look(self, config: C, parts: Mapping[str, Any]) -> None:
        """Find out what `parts`, which are ready, are configured to be, by which it is judged whether they are."""

    @abstractmethod
    def _provisional(self, config: C) -> bool:
        """Whether what its parts say now soon changes."""

    async def news(self, follower: str, seen: Seen, wait: bool) -> CatalogNews[Chosen]:
        """What became of services since `seen`: now, or else as soon as there is something, or after some seconds."""
        return await self.catalog.follow(follower, seen, _NEWS_WITHIN_S if wait else 0)

    def check(self) -> None:
        """Raise RuntimeError if a service is not seen to any more, though nothing was chosen for it."""
        for task in self._tasks:
            if task.done() and (task.cancelled() or task.exception()):
                raise RuntimeError(f"a service is not started any more: {task}")

    async def _start(self, name: str, config: C) -> None:
        """Choose what serves, once more when that was provisional, and whenever other data tell more."""
        while True:
            while await self._serve_choice(name, config):
                await self._settled(config)
            await self._other_data(name, config)
            logger.info("%s: other labelled data tell more of it now", name)

    async def _settled(self, config: C) -> None:
        while True:
            if not self._provisional(config):
                return
            await asyncio.sleep(_WAIT_S)

    async def _other_data(self, name: str, config: C) -> None:
        told = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if await self._others(name, config):
                    return
            except DataError as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("%s: keeps to the labelled data that it was measured on: %s", name, told)

    async def _serve_choice(self, name: str, config: C) -> bool:
        """Choose what serves; whether the choice is provisional."""
        pause_s, slowest_s = self._pauses_s
        while True:
            provisional = False
            try:
                async with self._awake(config.parts()):
                    parts = {part: await self._planning.open(part) for part in config.parts()}
                    await self._ready(name, parts)
                    await self._look(config, parts)
                    provisional = self._provisional(config)
                    choice = await self._choose(name, config, parts, provisional)
                state = self._told(name, choice)
                logger.info("%s: %s", name, state)
                self.catalog.put({name: Chosen(name, state, choice)})
            except RefusedError as error:
                self._complain(Chosen(name, error.state, self._chosen(name), error.problem, refused=True))
                pause_s = slowest_s
            except DataError as error:
                state = "cannot use its labelled data; see /stats"
                self._complain(Chosen(name, state, self._chosen(name), str(error), refused=True))
                pause_s = slowest_s
            except PliantError as error:
                self._complain(Chosen(name, "could not be profiled yet", self._chosen(name), str(error)))
            except Exception as error:
                self._complain(Chosen(name, "could not be profiled yet", self._chosen(name), repr(error)), error)
            else:
                return provisional
            if provisional:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._settled(config)
            else:
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, slowest_s)

    @asynccontextmanager
    async def _awake(self, parts: Sequence[str]) -> AsyncIterator[None]:
        """None of `parts` sleeps meanwhile: they are to be measured, or to say on what they were."""

        async def keep() -> None:
            while True:
                for part in parts:
                    self._planning.wake(part)
                await asyncio.sleep(_WAKES_S)

        waking = asyncio.create_task(keep())
        try:
            yield
        finally:
            waking.cancel()

    async def _ready(self, name: str, parts: Mapping[str, Any]) -> None:
        waiting: list[str] = []
        while now := [part for part, endpoint in parts.items() if not endpoint.ready]:
            if now != waiting:
                self._tell(name, f"waits for {', '.join(now)}")
            waiting = now
            await asyncio.sleep(_WAIT_S)

    async def _profiled(
        self,
        name: str,
        folder: Path,
        load: Callable[[Path], P | None],
        measure: Callable[[], Awaitable[P]],
        keep: Callable[[Path, P], None] | None,
    ) -> P:
        """What `load` finds in `folder`; measured if it is not there, one service at a time, and then kept there.

        Without `keep` it does not last. Raises DataError if nothing can be told from these data.
        """
        if folder in self._useless:
            raise DataError(self._useless[folder])
        if self._shared:
            await asyncio.to_thread(self._shared.fetch, folder)
        if found := await asyncio.to_thread(load, folder):
            logger.info("%s: profiled before, in %s", name, folder)
            return found
        async with self._profiling:
            try:
                found = await measure()
            except DataError as error:
                if keep:
                    self._useless[folder] = str(error)
                raise
        if not keep:
            return found
        try:
            await asyncio.to_thread(keep, folder, found)
        except Exception:
            logger.exception("%s: its profile is used, but cannot be kept in %s for the next start", name, folder)
        else:
            logger.info("%s: profiled; see %s", name, folder)
            if self._shared:
                await asyncio.to_thread(self._shared.share, folder)
        return found

    def _progress(self, name: str, doing: str) -> Callable[[str, float], None]:
        """Tells gateways, at every few percent, what of `doing` is being done."""
        told = ("", -1.0)

        def progress(what: str, done: float) -> None:
            nonlocal told
            if what != told[0] or done - told[1] >= _STEP:
                told = what, done
                self._tell(name, f"{doing}: {what}, {done:.0%}")

        return progress

    def _tell(self, name: str, state: str) -> None:
        logger.info("%s: %s", name, state)
        self.catalog.put({name: Chosen(name, state, self._chosen(name))})

    def _chosen(self, name: str) -> Any:
        """What serves until something else is chosen."""
        known = self.catalog.entries.get(name)
        return known.choice if known else None

    def _complain(self, entry: Chosen, bug: Exception | None = None) -> None:
        """Tell what is wrong; the log once, though it be found again and again, and where in case of a `bug`."""
        self.catalog.put({entry.service: entry})
        if self._complaints.get(entry.service) != entry.problem:
            self._complaints[entry.service] = entry.problem
            logger.error("%s: %s: %s", entry.service, entry.state, entry.problem, exc_info=bug)
