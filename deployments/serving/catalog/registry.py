"""What adapters and tasks have in common: found at the start, loaded and unloaded by clients, and listed in a catalog.

Plain asyncio, without Ray; files are read in threads. What clients did is on disk before they are told so, and outlives
the planner. Reads and writes have threads of their own, so that a folder that does not answer holds up no change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from pliant.deployments.serving.catalog.catalog import Catalog
from pliant.deployments.serving.catalog.confinement import MissingError, OutsideError
from pliant.deployments.serving.catalog.store import FileError
from pliant.deployments.serving.messages import Entry, Manager, Rejected
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.errors import PliantError

logger = logging.getLogger("pliant")

_READERS = 4
_READ_WITHIN_S = 10.0
_CHANGE_WITHIN_S = 3.0

_T = TypeVar("_T")
_Found = TypeVar("_Found", covariant=True)


class UnavailableError(PliantError):
    """A service for which nothing can be loaded, through no fault of the client's."""


_ENDS: dict[type[PliantError], tuple[Outcome, Fault | None]] = {
    OutsideError: (Outcome.REJECTED, Fault.FORBIDDEN),
    MissingError: (Outcome.REJECTED, Fault.NOT_FOUND),
    UnavailableError: (Outcome.UNAVAILABLE, None),
    PliantError: (Outcome.REJECTED, None),
}
"""What a client is told of a path; of several answers the last of these counts."""


class RejectedError(PliantError):
    """A call that changes nothing, and why."""

    def __init__(self, outcome: Outcome, reason: str, param: str | None = None, fault: Fault | None = None) -> None:
        super().__init__(reason)
        self.rejected = Rejected(outcome, reason, param, fault)


class Source(Protocol[_Found]):
    """The entries of one service, as files have them. It blocks."""

    service: str
    runtime: bool
    """Whether clients may load and unload entries."""

    def scan(self) -> Iterable[_Found | PliantError]:
        """All that is there, and what is wrong with what should be."""


S = TypeVar("S", bound=Source)  # type: ignore[type-arg]  # of the registry's entries


class Registry(ABC, Generic[Entry, S]):
    """The entries of all services; `catalog` tells gateways and replicas of them. `clock` gives Unix seconds."""

    what: str
    """Names the entries."""
    path: str
    """The parameter of a call that names a folder."""
    see: str
    """Where the entries are listed."""
    most_reading: int
    """Entries that are being loaded for clients at a time."""
    spread_within_s: float
    """How long a change waits for those who follow the catalog."""
    gone_s: float
    """One who has not asked for so long is not waited for any more."""

    def __init__(self, sources: Mapping[str, S], clock: Callable[[], float] = time.time) -> None:
        self.catalog: Catalog[Entry] = Catalog(self.gone_s)
        self._sources = sources
        self._clock = clock
        self._readers = ThreadPoolExecutor(_READERS, f"{self.what}-read")
        self._writer = ThreadPoolExecutor(1, f"{self.what}-write")
        self._reading = 0
        self._changing = asyncio.Lock()
        self._start = asyncio.create_task(self._scan())

    @abstractmethod
    async def load(self, *what: Any) -> Entry:
        """Register an entry for a client. Raises RejectedError."""

    @abstractmethod
    async def unload(self, *what: Any) -> Entry:
        """Forget an entry for a client. Raises RejectedError."""

    @abstractmethod
    def _key(self, entry: Entry) -> str:
        """What the catalog calls `entry`."""

    @abstractmethod
    def _check(self, entry: Entry) -> None:
        """Raise RejectedError if `entry`, which was found at the start, cannot be registered beside the others."""

    async def started(self) -> None:
        """Wait until all that was kept or lies in folders is registered, or complained of."""
        await asyncio.shield(self._start)

    def check(self) -> None:
        """Raise what kept the registry from starting, if something did."""
        if self._start.done():
            self._start.result()

    async def _scan(self) -> None:
        for service, source in self._sources.items():
            try:
                found = await self._read(lambda source=source: list(source.scan()))  # type: ignore[misc]
            except Exception as error:
                logger.exception("%s: its %s cannot be read", service, self.what)
                self._complain(f"{service}: its {self.what} cannot be read: {error!r}")
                continue
            known = 0
            for item in found:
                try:
                    if isinstance(item, PliantError):
                        raise item
                    self._check(item)
                except PliantError as error:
                    self._complain(f"{service}: {error}")
                else:
                    self.catalog.put({self._key(item): item})
                    known += 1
            logger.info("%s: knows %d %s", service, known, self.what)

    def _check_owner(self, by: Manager, name: str, owner: str) -> None:
        """Raise RejectedError unless `by` may unload or replace `name`, which `owner` loaded."""
        if not by.owns(owner):
            loaded = "another tenant loaded it" if owner else "no tenant loaded it"
            reason = (
                f"{name!r} is not {by.tenant}'s to unload or replace: {loaded}, and the right 'manage-all' is lacking"
            )
            raise RejectedError(Outcome.REJECTED, reason, fault=Fault.FORBIDDEN)

    def _complain(self, problem: str) -> None:
        logger.error("%s", problem)
        self.catalog.complain(problem)

    def _open(self, source: S) -> S:
        """`source`, if clients may change it. Raises RejectedError."""
        if not source.runtime:
            forbidden = f"{self.what}.runtime: false, so clients neither load nor unload its {self.what}"
            remedy = f"set it to true, or put them into {self.what}.folder and restart"
            raise RejectedError(Outcome.REJECTED, f"{source.service} has {forbidden}; {remedy}", fault=Fault.FORBIDDEN)
        return source

    async def _find(self, path: str, sources: Iterable[S], read: Callable[[S], _T]) -> list[_T | PliantError]:
        """What `read` makes of each of `sources`, for a client that named `path`. Raises RejectedError."""
        if self._reading >= self.most_reading:
            raise RejectedError(Outcome.SHED, f"{self._reading} {self.what} are being loaded; retry later")
        self._reading += 1
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                return await self._read(lambda: [_attempt(read, source) for source in sources])
        except TimeoutError:
            reason = f"{self.path}: {path!r} could not be read within {_READ_WITHIN_S:g} s"
            raise RejectedError(Outcome.UNAVAILABLE, reason, self.path) from None
        finally:
            self._reading -= 1

    def _misfit(self, errors: Iterable[PliantError]) -> RejectedError:
        """What to tell a client whose path led to these `errors`, of one or several services."""
        told = max(errors, key=lambda error: list(_ENDS).index(_kind(error)))
        outcome, fault = _ENDS[_kind(told)]
        return RejectedError(outcome, f"{self.path}: {told}", self.path, fault)

    async def _change(self, change: Callable[[], Awaitable[Entry]]) -> Entry:
        """Carry out `change` when no other is under way, and tell those who follow the catalog.

        Once begun it goes on, whether its caller is cancelled or waits no longer: memory and disk must agree.
        """
        writing: asyncio.Future[Entry] | None = None
        try:
            async with asyncio.timeout(_CHANGE_WITHIN_S):
                await self._changing.acquire()
                writing = asyncio.ensure_future(self._alone(change))
                changed = await asyncio.shield(writing)
        except TimeoutError:
            told = f"this may yet come about: see {self.see}" if writing else "nothing was changed: retry later"
            reason = f"a registry file could not be written within {_CHANGE_WITHIN_S:g} s; {told}"
            raise RejectedError(Outcome.UNAVAILABLE, reason) from None
        await self.catalog.spread(self.spread_within_s)
        return changed

    async def _alone(self, change: Callable[[], Awaitable[Entry]]) -> Entry:
        try:
            return await change()
        finally:
            self._changing.release()

    async def _write(self, change: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, change)
        except FileError as error:
            raise RejectedError(Outcome.UNAVAILABLE, f"nothing was changed, because {error}") from None

    async def _read(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)


def _attempt(read: Callable[[S], _T], source: S) -> _T | PliantError:
    try:
        return read(source)
    except PliantError as error:
        return error


def _kind(error: PliantError) -> type[PliantError]:
    return next(kind for kind in _ENDS if isinstance(error, kind))
