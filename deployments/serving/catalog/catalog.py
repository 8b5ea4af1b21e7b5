"""All that is registered by name, adapters, tasks or cascades, and how far each gateway has heard of it.

Plain asyncio, without Ray. Gateways, and replicas that follow a catalog, too, are sent what changed, not what there is,
so that one more entry costs the same however many there are.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

from pliant.deployments.serving.messages import CatalogNews, Entry

_REMEMBERED = 1_000
"""Changes; a gateway that has missed more is sent everything."""
_MOST_PROBLEMS = 100

Seen = tuple[str, int]
"""The life and the version of the latest news that a gateway has."""


class _Heard(NamedTuple):
    """What a gateway or replica said."""

    version: int
    """That it has."""
    at: float
    failed: Mapping[Any, str]


class Catalog(Generic[Entry]):
    """A gateway that has not asked for `gone_s` seconds of `clock` is not waited for any more."""

    def __init__(self, gone_s: float, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self.entries: dict[str, Entry] = {}
        """By name."""
        self.problems: list[str] = []
        """Of what should be there and is not; the first ones only."""
        self._gone_s = gone_s
        self._clock = clock
        self._life = uuid.uuid4().hex
        self._version = 0
        self._log: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._heard: dict[str, _Heard] = {}
        """By gateway."""
        self._moved = asyncio.Event()
        """Set, and replaced, whenever there is news or a gateway has heard of some."""

    def put(self, changes: Mapping[str, Entry | None]) -> None:
        """Register entries by name, forget those that are None, and notify the gateways."""
        for name, entry in changes.items():
            if entry is None:
                del self.entries[name]
            else:
                self.entries[name] = entry
            self._version += 1
            self._log.append((self._version, name))
        self._move()

    def complain(self, problem: str) -> None:
        """Have gateways show `problem`."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)
        self._version += 1
        self._move()

    def settle(self, problems: Iterable[str]) -> None:
        """Show `problems` no longer."""
        if not (gone := {*problems}):
            return
        self.problems = [problem for problem in self.problems if problem not in gone]
        self._version += 1
        self._move()

    def gave(self, seen: Seen) -> bool:
        """Whether it was this catalog of which a gateway has `seen` so much."""
        return seen[0] == self._life

    async def follow(
        self, gateway: str, seen: Seen, within_s: float, failed: Mapping[Any, str] = MappingProxyType({})
    ) -> CatalogNews[Entry]:
        """What a gateway does not know that has `seen` so much: as soon as there is something, or after `within_s`.

        Of that, `failed` names what it, being a replica, could not load, and why.
        """
        version = self._hear(gateway, seen, failed)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while seen == (self._life, self._version):
                    await self._moved.wait()
        whole = version < self._version - len(self._log)
        names = self.entries if whole else [name for number, name in self._log if number > version]
        changes = {name: self.entries.get(name) for name in names}
        return CatalogNews(self._life, self._version, changes, whole, tuple(self.problems))

    async def spread(self, within_s: float) -> None:
        """Wait until every gateway knows what there is now, but not longer than `within_s`."""
        version = self._version
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while any(heard.version < version for heard in self._present().values()):
                    await self._moved.wait()

    def failure(self, what: Any) -> str | None:
        """Why a replica could not load `what`, if one reported it."""
        return next((heard.failed[what] for heard in self._present().values() if what in heard.failed), None)

    def _hear(self, gateway: str, seen: Seen, failed: Mapping[Any, str]) -> int:
        """Note which version `gateway` has, -1 if it has none of this life. Its calls may overtake each other."""
        version = seen[1] if seen[0] == self._life else -1
        said = _Heard(version, self._clock(), failed)
        heard = self._heard.get(gateway, said)
        self._heard[gateway] = said if heard.version <= version else heard._replace(at=said.at)
        self._move()
        return version

    def _present(self) -> dict[str, _Heard]:
        now = self._clock()
        self._heard = {gateway: heard for gateway, heard in self._heard.items() if now - heard.at < self._gone_s}
        return self._heard

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
