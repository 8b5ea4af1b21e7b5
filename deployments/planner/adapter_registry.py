"""Which LoRA adapters there are: found in folders at the start, loaded and unloaded by clients later (Chameleon §2).

Plain asyncio, without Ray; files are read in threads. Here an adapter is its metadata, a few hundred bytes: replicas
read the weights when a request needs them. What clients did is on disk before they are told so, and outlives the
planner. Reads and writes have threads of their own, so that a folder that does not answer holds up no change.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from pliant.adapter_info import AdapterError, AdapterInfo
from pliant.config import ServingConfig
from pliant.deployments.planner.adapter_board import AdapterBoard
from pliant.deployments.planner.adapter_file import FileError
from pliant.deployments.planner.adapter_folders import MissingError, OutsideError, UnavailableError
from pliant.deployments.planner.adapter_shelf import AdapterShelf
from pliant.deployments.planner.messages import Registered, Rejected
from pliant.errors import PliantError

logger = logging.getLogger("pliant")

MOST_ADAPTERS = 10_000
"""To list them all, or to tell a new gateway of them, then takes an event loop about a fifth of a second."""
_MOST_READING = 64
"""Adapters that are being loaded for clients at a time."""
_READ_WITHIN_S = 10.0
_CHANGE_WITHIN_S = 3.0
_SPREAD_WITHIN_S = 1.0
_GONE_S = 15.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_STATUS = {OutsideError: 403, MissingError: 404, UnavailableError: 503, AdapterError: 400}
"""What a client is told of a path; of several answers the last of these counts."""

_T = TypeVar("_T")


class RejectedError(PliantError):
    """A call that changes nothing, and why."""

    def __init__(self, status: int, reason: str, param: str | None = "lora_name") -> None:
        super().__init__(reason)
        self.rejected = Rejected(status, reason, param)


class AdapterRegistry:
    """The adapters of all language models of `config` that have some. To clients all their names are model names.

    `board` tells gateways of them. `clock` gives Unix seconds.
    """

    def __init__(self, config: ServingConfig, clock: Callable[[], float] = time.time) -> None:
        self.board = AdapterBoard(_GONE_S)
        self._clock = clock
        self._models = frozenset(config.services)
        self._shelves = {
            name: AdapterShelf(name, service, service.adapters)
            for name, service in config.llms.items()
            if service.adapters
        }
        self._readers = ThreadPoolExecutor(4, "adapters-read")
        self._writer = ThreadPoolExecutor(1, "adapters-write")
        self._reading = 0
        self._changing = asyncio.Lock()
        self._start = asyncio.create_task(self._stock())
        self._refresh = asyncio.create_task(self._read_again())

    async def started(self) -> None:
        """Wait until all that was kept or lies in folders is registered, or complained of."""
        await asyncio.shield(self._start)

    def check(self) -> None:
        """Raise what kept the registry from starting, if something did."""
        if self._start.done():
            self._start.result()

    async def load(self, name: str, path: str, service: str | None = None, in_place: bool = False) -> Registered:
        """Register the adapter in the folder `path` as `name`, for `service` or else for the one that it fits.

        With `in_place` it may take the place of one of that name. When this returns it is on disk, and the gateways
        that answer within a second know of it; others ask when they are given the name.

        Raises RejectedError. Then nothing is changed, unless its reason says that the file may yet be written.
        """
        await self.started()
        shelves = self._open_shelves(service)
        self._check_name(name)
        self._check_free(name, in_place)
        shelf, info = await self._find(path, shelves)
        entry = await self._change(lambda: self._put(name, shelf, info, in_place))
        logger.info("%s: loaded adapter %s of rank %d", entry.service, name, entry.adapter.rank)
        return entry

    async def unload(self, name: str) -> Registered:
        """Forget `name`; requests under way end as they would have.

        When this returns the gateways that answer within a second refuse new ones; others do once they hear of it.
        Raises RejectedError as `load` does.
        """
        await self.started()
        known = await self._change(lambda: self._remove(name))
        logger.info("%s: unloaded adapter %s", known.service, name)
        return known

    async def _stock(self) -> None:
        for service, shelf in self._shelves.items():
            try:
                found = await self._read(lambda shelf=shelf: list(shelf.stock()))  # type: ignore[misc]
            except Exception as error:
                logger.exception("%s: its adapters cannot be read", service)
                self._complain(f"{service}: its adapters cannot be read: {error!r}")
                continue
            for item in found:
                try:
                    if isinstance(item, PliantError):
                        raise item
                    self._check_name(item.adapter.name)
                    self._check_free(item.adapter.name, in_place=False)
                except PliantError as error:
                    self._complain(f"{service}: {error}")
                else:
                    self.board.put({item.adapter.name: item})
            mine = {name for name, entry in self.board.entries.items() if entry.service == service}
            for name in sorted(shelf.pinned - mine):
                self._complain(f"{service}: adapters.pinned: got {name}; there is no such adapter in the folder")
            logger.info("%s: knows %d adapters", service, len(mine))

    async def _read_again(self) -> None:
        """Look, one after another, whether the files of what was believed at the start are still the same."""
        await self.started()
        for name, entry in list(self.board.entries.items()):
            shelf, folder = self._shelves[entry.service], entry.adapter.folder
            if shelf.kept(name) != entry:
                continue
            try:
                info = await self._read(partial(shelf.attempt, folder))
            except Exception:
                logger.exception("%s: %s cannot be looked at again", entry.service, name)
                continue
            if self.board.entries.get(name) is not entry:
                continue
            if isinstance(info, AdapterError):
                self._complain(f"{entry.service}: {name}, loaded earlier: {info}")
            elif info.ref(name) != entry.adapter:
                self.board.put({name: entry._replace(adapter=info.ref(name))})

    def _complain(self, problem: str) -> None:
        logger.error("%s", problem)
        self.board.complain(problem)

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            wanted = "must be up to 200 letters, digits and ._-, beginning with a letter or digit"
            raise RejectedError(400, f"lora_name: got {name[:60]!r}; {wanted}")
        if name in self._models:
            raise RejectedError(400, f"lora_name: {name!r} is the name of a model; choose another")

    def _check_free(self, name: str, in_place: bool) -> None:
        known = self.board.entries.get(name)
        if known is not None and not in_place:
            raise RejectedError(
                400,
                f"lora_name: the adapter {name!r} of {known.service} is loaded already, from {known.adapter.folder}; "
                "unload it first, or send load_inplace: true to replace it",
            )
        if known is None and len(self.board.entries) >= MOST_ADAPTERS:
            raise RejectedError(400, f"{MOST_ADAPTERS} adapters are loaded, as many as there may be; unload some")

    def _check_movable(self, name: str) -> None:
        for service, shelf in self._shelves.items():
            if name in shelf.pinned:
                reason = f"lora_name: {name!r} is pinned by the configuration of {service}"
                raise RejectedError(400, f"{reason}; take it out of adapters.pinned first")

    def _open_shelves(self, service: str | None) -> list[AdapterShelf]:
        """Those that clients may change, of `service` or of all. Raises RejectedError if there are none."""
        if service is not None and service not in self._shelves:
            reason = f"base_model_name: got {service[:60]!r}; with adapters there are: {', '.join(self._shelves)}"
            raise RejectedError(400, reason, "base_model_name")
        shelves = [self._shelves[service]] if service else list(self._shelves.values())
        return [shelf for shelf in shelves if shelf.runtime] or [_open(shelf) for shelf in shelves]

    async def _find(self, path: str, shelves: Sequence[AdapterShelf]) -> tuple[AdapterShelf, AdapterInfo]:
        """The adapter at `path`, and the one of `shelves` that it is for."""
        if self._reading >= _MOST_READING:
            raise RejectedError(429, f"{self._reading} adapters are being loaded; retry later", None)
        self._reading += 1
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                found = await self._read(lambda: [shelf.attempt(path) for shelf in shelves])
        except TimeoutError:
            reason = f"lora_path: {path!r} could not be read within {_READ_WITHIN_S:g} s"
            raise RejectedError(503, reason, "lora_path") from None
        finally:
            self._reading -= 1
        fits = [(shelf, info) for shelf, info in zip(shelves, found, strict=True) if isinstance(info, AdapterInfo)]
        meant = [(shelf, info) for shelf, info in fits if shelf.trained_on(info.base)]
        for choice in (fits, meant):
            if len(choice) == 1:
                return choice[0]
        if fits:
            names = ", ".join(shelf.service for shelf, _ in fits)
            reason = f"base_model_name: must be given, because {path!r} fits several models: {names}"
            raise RejectedError(400, reason, "base_model_name")
        errors = [error for error in found if isinstance(error, AdapterError)]
        told = max(errors, key=lambda error: list(_STATUS).index(type(error)))
        raise RejectedError(_STATUS[type(told)], f"lora_path: {told}", "lora_path")

    async def _change(self, change: Callable[[], Awaitable[Registered]]) -> Registered:
        """Carry out `change` when no other is under way, and tell the gateways.

        Once begun it goes on, whether its caller is cancelled or waits no longer: memory and disk must agree.
        """
        writing: asyncio.Future[Registered] | None = None
        try:
            async with asyncio.timeout(_CHANGE_WITHIN_S):
                await self._changing.acquire()
                writing = asyncio.ensure_future(self._alone(change))
                changed = await asyncio.shield(writing)
        except TimeoutError:
            told = "this may yet come about: see /v1/models" if writing else "nothing was changed: retry later"
            reason = f"a registry file could not be written within {_CHANGE_WITHIN_S:g} s; {told}"
            raise RejectedError(503, reason, None) from None
        await self.board.spread(_SPREAD_WITHIN_S)
        return changed

    async def _alone(self, change: Callable[[], Awaitable[Registered]]) -> Registered:
        try:
            return await change()
        finally:
            self._changing.release()

    async def _put(self, name: str, shelf: AdapterShelf, info: AdapterInfo, in_place: bool) -> Registered:
        self._check_free(name, in_place)  # meanwhile somebody else may have taken the name
        self._check_movable(name)
        known = self.board.entries.get(name)
        if known and known.service != shelf.service:
            reason = f"lora_name: {name!r} is an adapter of {known.service}, and this one is of {shelf.service}"
            raise RejectedError(400, f"{reason}; unload it first")
        entry = Registered(shelf.service, info.ref(name), int(self._clock()))
        await self._write(lambda: shelf.keep(entry, known))
        self.board.put({name: entry})
        return entry

    async def _remove(self, name: str) -> Registered:
        known = self.board.entries.get(name)
        kept = (entry for shelf in self._shelves.values() if (entry := shelf.kept(name)))
        entry = known or next(kept, None)
        if entry is None:
            raise RejectedError(404, f"lora_name: there is no adapter {name[:200]!r}; /v1/models lists those there are")
        self._check_movable(name)
        shelf = _open(self._shelves[entry.service])
        await self._write(lambda: shelf.forget(entry))
        if known:
            self.board.put({name: None})
        return entry

    async def _write(self, change: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, change)
        except FileError as error:
            raise RejectedError(503, f"nothing was changed, because {error}", None) from None

    async def _read(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, function)


def _open(shelf: AdapterShelf) -> AdapterShelf:
    """`shelf`, if clients may change it."""
    if not shelf.runtime:
        reason = f"{shelf.service} has adapters.runtime: false, so clients neither load nor unload its adapters"
        raise RejectedError(403, f"{reason}; set it to true, or put them into adapters.folder and restart", None)
    return shelf
