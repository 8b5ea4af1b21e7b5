"""Which LoRA adapters there are: found in folders at the start, loaded and unloaded by clients later (Chameleon §2).

Here an adapter is its metadata, a few hundred bytes: replicas read the weights when a request needs them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pliant.config.cluster import ServingConfig
from pliant.config.llm import LlmConfig
from pliant.deployments.llm.adapter_source import AdapterSource
from pliant.deployments.llm.messages import Registered
from pliant.deployments.serving.catalog.registry import Registry, RejectedError, logger
from pliant.deployments.serving.messages import OPERATOR, Manager
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.storage import storage
from pliant.errors import PliantError
from pliant.formats.adapter_info import AdapterInfo

MOST_ADAPTERS = 10_000
"""To list them all, or to send them to a new gateway, then takes an event loop about a fifth of a second."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class AdapterRegistry(Registry[Registered, AdapterSource]):
    """The adapters of all language models of `config` that have some. To clients all their names are model names."""

    what = "adapters"
    path = "lora_path"
    see = "/v1/models"
    most_reading = 64
    spread_within_s = 1.0
    gone_s = 15.0

    def __init__(self, config: ServingConfig, clock: Callable[[], float] = time.time) -> None:
        self._models = frozenset(config.services)
        state = storage(config.state)
        sources = {
            name: AdapterSource(name, service, service.adapters, state)
            for name, service in config.of(LlmConfig).items()
            if service.adapters
        }
        super().__init__(sources, clock)
        self._refresh = asyncio.create_task(self._read_again())

    async def load(
        self,
        name: str,
        path: str,
        service: str | None = None,
        in_place: bool = False,
        by: Manager = OPERATOR,
        again: bool = False,
    ) -> Registered:
        """Register the adapter in the folder `path` as `name`, for `service` or else for the one that it fits.

        With `in_place` it may take the place of one of that name, if that is `by`'s. When this returns it is
        stored, and the gateways that answer within a second know of it; others ask when they are given the name.

        Raises RejectedError. Then nothing is changed, unless its reason says that it may yet come about. `again`: an
        earlier planner was asked to, which may have.
        """
        await self.started()
        sources = self._open_sources(service, by)
        self._check_name(name)
        if not again:
            self._check_free(name, in_place, by)
        source, info = await self._fitting(path, sources)
        entry = await self._change(lambda: self._put(name, source, info, in_place, by, again))
        logger.info("%s: loaded adapter %s of rank %d", entry.service, name, entry.adapter.rank)
        return entry

    async def unload(self, name: str, by: Manager = OPERATOR) -> Registered:
        """Forget `name`, if it is `by`'s; requests under way end as they would have.

        When this returns the gateways that answer within a second refuse new ones; others do once they hear of it.
        Raises RejectedError as `load` does.
        """
        await self.started()
        known = await self._change(lambda: self._remove(name, by))
        logger.info("%s: unloaded adapter %s", known.service, name)
        return known

    def _missed(self, service: str) -> Iterator[str]:
        mine = {name for name, entry in self.catalog.entries.items() if entry.service == service}
        for name in sorted(self._sources[service].pinned - mine):
            yield f"{service}: adapters.pinned: got {name}; there is no such adapter in the folder"

    async def _read_again(self) -> None:
        """Look, one after another, whether the files of what was believed at the start are still the same."""
        await self.started()
        for name, entry in list(self.catalog.entries.items()):
            source = self._sources[entry.service]
            if source.kept(name) != entry:
                continue
            found: AdapterInfo | PliantError
            try:
                found = await self._read(partial(source.read, entry.adapter.folder))
            except PliantError as error:
                found = error
            except Exception:
                logger.exception("%s: %s cannot be looked at again", entry.service, name)
                continue
            if self.catalog.entries.get(name) is not entry:
                continue
            if isinstance(found, PliantError):
                self._complain(f"{entry.service}: {name}, loaded earlier: {found}")
            elif found.ref(name) != entry.adapter:
                self.catalog.put({name: entry._replace(adapter=found.ref(name))})

    def _key(self, entry: Registered) -> str:
        return entry.adapter.name

    def _check(self, entry: Registered) -> None:
        self._check_name(entry.adapter.name)
        self._check_free(entry.adapter.name, in_place=False, by=OPERATOR)

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            wanted = "must be up to 200 letters, digits and ._-, beginning with a letter or digit"
            raise _rejected(f"got {name[:60]!r}; {wanted}")
        if name in self._models:
            raise _rejected(f"{name!r} is the name of a model; choose another")

    def _check_free(self, name: str, in_place: bool, by: Manager) -> None:
        known = self.catalog.entries.get(name)
        if known is not None and in_place:
            self._check_owner(by, name, known.owner)
        elif known is not None:
            raise _rejected(
                f"the adapter {name!r} of {known.service} is loaded already; unload it "
                "first, or send load_inplace: true to replace it"
            )
        if known is None and len(self.catalog.entries) >= MOST_ADAPTERS:
            raise _rejected(f"{MOST_ADAPTERS} adapters are loaded, as many as there may be; unload some")

    def _check_movable(self, name: str) -> None:
        for service, source in self._sources.items():
            if name in source.pinned:
                reason = f"{name!r} is pinned by the configuration of {service}"
                raise _rejected(f"{reason}; take it out of adapters.pinned first")

    def _open_sources(self, service: str | None, by: Manager) -> list[AdapterSource]:
        """Those that `by` may change, of `service` or of all. Raises RejectedError if there are none."""
        allowed = {name: source for name, source in self._sources.items() if by.may_use(name)}
        if service is not None and service not in self._sources:
            reason = f"base_model_name: got {service[:60]!r}; with adapters there are: {', '.join(allowed)}"
            raise RejectedError(Outcome.REJECTED, reason, "base_model_name")
        if not allowed or (service and service not in allowed):
            reason = f"tenant {by.tenant} may not use {service or 'any model that takes adapters'}"
            raise RejectedError(Outcome.REJECTED, reason, "base_model_name", Fault.FORBIDDEN)
        sources = [allowed[service]] if service else list(allowed.values())
        return [source for source in sources if source.runtime] or [self._open(source) for source in sources]

    async def _fitting(self, path: str, sources: Sequence[AdapterSource]) -> tuple[AdapterSource, AdapterInfo]:
        """The adapter at `path`, and the one of `sources` that it is for."""
        found = await self._find(path, sources, lambda source: source.read(path))
        fits = [(source, info) for source, info in zip(sources, found, strict=True) if isinstance(info, AdapterInfo)]
        meant = [(source, info) for source, info in fits if source.trained_on(info.base)]
        for choice in (fits, meant):
            if len(choice) == 1:
                return choice[0]
        if fits:
            names = ", ".join(source.service for source, _ in fits)
            reason = f"base_model_name: must be given, because {path!r} fits several models: {names}"
            raise RejectedError(Outcome.REJECTED, reason, "base_model_name")
        raise self._misfit(error for error in found if isinstance(error, PliantError))

    async def _put(
        self, name: str, source: AdapterSource, info: AdapterInfo, in_place: bool, by: Manager, again: bool
    ) -> Registered:
        entry = Registered(source.service, info.ref(name), int(self._clock()), by.tenant)
        known = self.catalog.entries.get(name)
        in_place = in_place or (again and known is not None and known._replace(created=entry.created) == entry)
        self._check_free(name, in_place, by)  # meanwhile somebody else may have taken the name
        self._check_movable(name)
        if kept := source.kept(name):  # whether it is served now or not
            self._check_owner(by, name, kept.owner)
        if known and known.service != source.service:
            reason = f"{name!r} is an adapter of {known.service}, and this one is of {source.service}"
            raise _rejected(f"{reason}; unload it first")
        await self._write(source.store, lambda: source.keep(entry, known))
        self.catalog.put({name: entry})
        return entry

    async def _remove(self, name: str, by: Manager) -> Registered:
        known = self.catalog.entries.get(name)
        kept = (entry for source in self._sources.values() if (entry := source.kept(name)))
        entry = known or next(kept, None)
        if entry is None:
            raise _rejected(f"there is no adapter {name[:200]!r}; /v1/models lists those there are", Fault.NOT_FOUND)
        if not by.may_use(entry.service):
            reason = f"{name!r} is of {entry.service}, which tenant {by.tenant} may not use"
            raise _rejected(reason, Fault.FORBIDDEN)
        self._check_movable(name)
        self._check_owner(by, name, entry.owner)
        source = self._open(self._sources[entry.service])
        await self._write(source.store, lambda: source.forget(entry))
        if known:
            self.catalog.put({name: None})
        return entry


def _rejected(reason: str, fault: Fault | None = None) -> RejectedError:
    return RejectedError(Outcome.REJECTED, f"lora_name: {reason}", "lora_name", fault)
