"""Which tasks there are: found in folders at the start, loaded and unloaded by clients later (OTAS §III-A).

Here a task is its description: replicas, which follow the catalog as gateways do, read its tensors.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

from pliant.config.cluster import ServingConfig
from pliant.config.vision import VisionConfig
from pliant.deployments.serving.catalog.registry import Registry, RejectedError, logger
from pliant.deployments.serving.messages import OPERATOR, Manager
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.state.storage import storage
from pliant.deployments.vision.messages import RegisteredTask
from pliant.deployments.vision.task_source import TaskSource
from pliant.errors import PliantError
from pliant.formats.vision_task import NAME

MOST_TASKS = 1_000
"""Of one service."""


class TaskRegistry(Registry[RegisteredTask, TaskSource]):
    """The tasks of all vision services of `config`; `catalog` has them by service/name.

    A replica has heard of a task when it has loaded it, or cannot.
    """

    what = "tasks"
    path = "path"
    see = "the list of tasks"
    most_reading = 16
    spread_within_s = 30.0
    gone_s = 45.0

    def __init__(self, config: ServingConfig, clock: Callable[[], float] = time.time) -> None:
        state = storage(config.state)
        services = config.of(VisionConfig)
        super().__init__({name: TaskSource(name, service, state) for name, service in services.items()}, clock)
        self._trials = count()

    async def load(
        self, service: str, name: str, path: str, replace: bool = False, by: Manager = OPERATOR, again: bool = False
    ) -> RegisteredTask:
        """Register the task in the folder `path` as `name` of `service`; `replace`: maybe instead of one of `by`'s.

        Replicas load it before clients may name it. When this returns it is stored, and gateways and replicas have it,
        unless one takes half a minute. Raises RejectedError, also when a replica cannot load it. Then nothing is
        changed, unless its reason says that it may yet come about. `again`: an earlier planner was asked to, which may
        have.
        """
        await self.started()
        source = self._open(self._source(service))
        self._check_name(name)
        if not again:
            self._check_free(service, name, replace, by)
        [entry] = await self._find(path, [source], lambda source: source.read(name, path, int(self._clock())))
        if isinstance(entry, PliantError):
            raise self._misfit([entry])
        entry = entry._replace(owner=by.tenant)
        async with self._tried(entry):
            await self._change(lambda: self._put(source, entry, replace, by, again))
        logger.info("%s: loaded task %s with %d labels", service, name, len(entry.labels))
        return entry

    async def unload(self, service: str, name: str, by: Manager = OPERATOR) -> RegisteredTask:
        """Forget the task `name` of `service`, if it is `by`'s.

        When this returns that is stored, and gateways and replicas know it, unless one takes half a minute. Raises
        RejectedError as `load` does.
        """
        await self.started()
        known = await self._change(lambda: self._remove(self._source(service), name, by))
        logger.info("%s: unloaded task %s", service, name)
        return known

    def _key(self, entry: RegisteredTask) -> str:
        return f"{entry.service}/{entry.task.name}"

    def _check(self, entry: RegisteredTask) -> None:
        self._check_name(entry.task.name)
        self._check_free(entry.service, entry.task.name, replace=False, by=OPERATOR)

    def _source(self, service: str) -> TaskSource:
        if service not in self._sources:
            there = ", ".join(self._sources) or "none"
            raise RejectedError(
                Outcome.REJECTED, f"{service[:60]!r} is no vision service; there are: {there}", fault=Fault.NOT_FOUND
            )
        return self._sources[service]

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            wanted = "must be up to 64 letters, digits and ._-, beginning with a letter or digit"
            raise _rejected(f"got {name[:60]!r}; {wanted}")

    def _check_free(self, service: str, name: str, replace: bool, by: Manager) -> None:
        known = self.catalog.entries.get(f"{service}/{name}")
        if known is not None:
            _check_movable(known)
            if not replace:
                taken = f"{service} has {name!r} already"
                raise _rejected(f"{taken}; unload it first, or send replace: true", Fault.CONFLICT)
            self._check_owner(by, name, known.owner)
        elif sum(each.service == service and not each.coming for each in self.catalog.entries.values()) >= MOST_TASKS:
            raise _rejected(f"{service} has {MOST_TASKS} tasks, as many as there may be; unload some")

    @asynccontextmanager
    async def _tried(self, entry: RegisteredTask) -> AsyncIterator[None]:
        """Meanwhile replicas have `entry`, which clients may not name yet. Raises RejectedError if one cannot."""
        trial = f"{self._key(entry)} {next(self._trials)}"
        self.catalog.put({trial: entry._replace(coming=True)})
        try:
            await self.catalog.spread(self.spread_within_s)
            if failure := self.catalog.failure(entry.task):
                raise RejectedError(Outcome.REJECTED, f"path: a replica cannot load it: {failure}", self.path)
            yield
        finally:
            self.catalog.put({trial: None})

    async def _put(
        self, source: TaskSource, entry: RegisteredTask, replace: bool, by: Manager, again: bool
    ) -> RegisteredTask:
        known = self.catalog.entries.get(self._key(entry))
        replace = replace or (again and known is not None and known._replace(created=entry.created) == entry)
        self._check_free(
            source.service, entry.task.name, replace, by
        )  # meanwhile somebody else may have taken the name
        if kept := source.kept(entry.task.name):  # whether it is served now or not
            self._check_owner(by, entry.task.name, kept.owner)
        await self._write(source.store, lambda: source.keep(entry, known))
        self.catalog.put({self._key(entry): entry})
        return entry

    async def _remove(self, source: TaskSource, name: str, by: Manager) -> RegisteredTask:
        key = f"{source.service}/{name}"
        known = self.catalog.entries.get(key)
        entry = known or source.kept(name)
        if entry is None:
            raise _rejected(f"{source.service} has no {name[:100]!r}", Fault.NOT_FOUND)
        _check_movable(entry)
        self._check_owner(by, name, entry.owner)
        self._open(source)
        await self._write(source.store, lambda: source.forget(entry))
        if known:
            self.catalog.put({key: None})
        return entry


def _check_movable(entry: RegisteredTask) -> None:
    if entry.task.is_own:
        raise _rejected(f"{entry.task.name!r} is the model's own head, which stays; choose another name")


def _rejected(reason: str, fault: Fault | None = None) -> RejectedError:
    return RejectedError(Outcome.REJECTED, f"task: {reason}", "task", fault)
