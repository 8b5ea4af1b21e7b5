"""What adapters and tasks have in common: found at the start, loaded and unloaded by clients, and listed in a catalog.

Plain asyncio, without Ray; files are read in threads. What clients did is stored before it is confirmed, and outlives
the planner. Reads and writes have threads of their own, so that a folder that does not answer holds up no change. What
was wrong at the start is looked at again: a share may be mounted late.
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
from pliant.deployments.serving.catalog.store import Store
from pliant.deployments.serving.messages import Entry, Manager, Rejected
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.record import StateError, SupersededError, UncertainError
from pliant.errors import PliantError

logger = logging.getLogger("pliant")

_READERS = 4
_READ_WITHIN_S = 10.0
_CHANGE_WITHIN_S = 3.0
_SETTLE_EVERY_S = 2.0
_AGAIN_S = (5.0, 300.0)
"""After which what is wrong is looked at again; the first doubles up to the second."""

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
"""What a client is answered about a path; of several answers the last of these counts."""


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
    store: Store[Any]
    """What they did."""

    def scan(self) -> Iterable[_Found | PliantError]:
        """All that is there, and what is wrong with what should be."""


S = TypeVar("S", bound=Source)  # type: ignore[type-arg]  # of the registry's entries


class Registry(ABC, Generic[Entry, S]):
    """The entries of all services; `catalog` sends them to gateways and replicas. `clock` gives Unix seconds."""

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
        self._changes = 0
        self._problems: dict[str, list[str]] = {}
        """By service: what was wrong when it was last looked at."""
        self._found: dict[str, set[str]] = {}
        """By service: the names of what was there then."""
        self._unread = {*sources}
        """Services whose store could not be claimed, or has been, and not been read since."""
        self.looks = 0
        """How often what is stored was read, and the catalog made to agree."""
        self._unstored = ""
        """Why the last change could not be stored, as it is shown."""
        self._superseded: SupersededError | None = None
        self._settling: asyncio.Task[None] | None = None
        """Of the last change of which it is uncertain whether it came about."""
        self._start = asyncio.create_task(self._scan_all())
        self._again = asyncio.create_task(self._look_again())

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
        """Raise what keeps the registry from working, if something does: then it takes another planner."""
        if self._superseded:
            raise self._superseded
        for task in (self._start, self._again):
            if task.done():
                task.result()

    async def confirm(self) -> None:
        """Raise StateError unless this registry knows what is stored; SupersededError if another planner has claimed it
        since, which knows better."""

        def check() -> None:
            for source in self._sources.values():
                source.store.check()

        try:
            await self._read(check)
            if self._unread:
                raise StateError(f"the {self.what} of {', '.join(sorted(self._unread))} are being read")
        except SupersededError as error:
            self._superseded = error
            raise

    def _missed(self, service: str) -> Iterable[str]:
        """What should be there of `service`, and has not been found."""
        return ()

    async def _scan_all(self) -> None:
        for service in self._sources:
            await self._scan(service)
            mine = sum(entry.service == service for entry in self.catalog.entries.values())
            logger.info("%s: knows %d %s", service, mine, self.what)

    async def _look_again(self) -> None:
        await self.started()
        pause_s, slowest_s = _AGAIN_S
        while wrong := [service for service, problems in self._problems.items() if problems]:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, slowest_s)
            for service in wrong:
                await self._scan(service)

    async def _scan(self, service: str) -> None:
        """Register what files have of `service` and the catalog has not, and say what is wrong."""
        problems, changes = [], self._changes
        if anew := not self._sources[service].store.claimed:
            self._unread.add(service)
        try:
            found = await self._read(lambda: list(self._sources[service].scan()))
        except Exception as error:
            logger.exception("%s: its %s cannot be read", service, self.what)
            problems.append(f"{service}: its {self.what} cannot be read: {error!r}")
            found = []
        seen: set[str] = set()
        async with self._changing:
            if changes != self._changes:
                return  # what was found may have been unloaded since
            for item in found:
                try:
                    if isinstance(item, PliantError):
                        raise item
                    self._add(service, item, seen, anew)
                except PliantError as error:
                    problems.append(f"{service}: {error}")
            if anew:
                gone = self._found.get(service, set()) - seen
                self.catalog.put(dict.fromkeys(gone & self.catalog.entries.keys()))
                self._unread.discard(service)
                self.looks += 1
            self._found[service] = seen
            problems += self._missed(service)
        before = self._problems.get(service, [])
        self._problems[service] = problems
        self.catalog.settle(problem for problem in before if problem not in problems)
        for problem in problems:
            if problem not in before:
                self._complain(problem)

    def _add(self, service: str, entry: Entry, seen: set[str], anew: bool) -> None:
        """Register `entry`, unless an earlier look did; `anew`: that may have been before another planner's changes.
        Raises RejectedError."""
        key = self._key(entry)
        known = self.catalog.entries.get(key)
        if known is None or known.service != service or key in seen:
            self._check(entry)
            self.catalog.put({key: entry})
        elif anew and known != entry:
            self.catalog.put({key: entry})
        seen.add(key)

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
        """What to answer a client whose path led to these `errors`, of one or several services."""
        error = max(errors, key=lambda each: list(_ENDS).index(_kind(each)))
        outcome, fault = _ENDS[_kind(error)]
        return RejectedError(outcome, f"{self.path}: {error}", self.path, fault)

    async def _change(self, change: Callable[[], Awaitable[Entry]]) -> Entry:
        """Carry out `change` when no other is under way, and notify those who follow the catalog.

        Once begun it goes on, whether its caller is cancelled or waits no longer: memory and disk must agree.
        """
        writing: asyncio.Future[Entry] | None = None
        try:
            async with asyncio.timeout(_CHANGE_WITHIN_S):
                await self._changing.acquire()
                writing = asyncio.ensure_future(self._alone(change))
                changed = await asyncio.shield(writing)
        except TimeoutError:
            state = f"this may yet come about: see {self.see}" if writing else "nothing was changed: retry later"
            reason = f"this could not be stored within {_CHANGE_WITHIN_S:g} s; {state}"
            raise RejectedError(Outcome.UNAVAILABLE, reason) from None
        await self.catalog.spread(self.spread_within_s)
        return changed

    async def _alone(self, change: Callable[[], Awaitable[Entry]]) -> Entry:
        self._changes += 1
        try:
            return await change()
        finally:
            self._changing.release()

    async def _write(self, store: Store[Any], change: Callable[[], None]) -> None:
        """Carry out `change` of `store`."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, change)
        except SupersededError as error:
            self._superseded = error
            raise RejectedError(Outcome.UNAVAILABLE, str(error)) from None
        except UncertainError as error:
            self._stored(error)
            self._settling = asyncio.create_task(self._settle(store))
            raise RejectedError(Outcome.UNAVAILABLE, f"{error}; this may yet come about: see {self.see}") from None
        except StateError as error:
            self._stored(error)
            raise RejectedError(Outcome.UNAVAILABLE, f"nothing was changed, because {error}") from None
        self._stored()

    def _stored(self, failure: StateError | None = None) -> None:
        """A change was stored, or not: show that until one is."""
        if self._unstored:
            self.catalog.settle([self._unstored])
            self._unstored = ""
        if failure:
            self._unstored = f"{self.what} that clients load or unload cannot be stored: {failure}"
            self._complain(self._unstored)

    async def _settle(self, store: Store[Any]) -> None:
        """Once its storage works again, have it hold what the catalog says."""
        while True:
            await asyncio.sleep(_SETTLE_EVERY_S)
            async with self._changing:
                try:
                    await asyncio.get_running_loop().run_in_executor(self._writer, store.settle)
                except SupersededError as error:
                    self._superseded = error
                except StateError:
                    continue
                self._stored()
                return

    async def _read(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)


def _attempt(read: Callable[[S], _T], source: S) -> _T | PliantError:
    try:
        return read(source)
    except PliantError as error:
        return error


def _kind(error: PliantError) -> type[PliantError]:
    return next(kind for kind in _ENDS if isinstance(error, kind))
