"""The Ray Serve shell of the planner: one replica for all services of the application.

It may die and come back without a request noticing: gateways go on with what they know, each conductor goes on from
what the replicas hold, and the registries of adapters and tasks from their files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ray.serve.handle import DeploymentHandle

from pliant.config.cluster import ServingConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.levels import Unrecorded, run_on
from pliant.deployments.cascade.messages import CascadeEntry
from pliant.deployments.cascade.planner import CascadeRegistry
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.engine import Assignment, Report
from pliant.deployments.encoder.lengths import Lengths
from pliant.deployments.encoder.routing_table import RoutingTable, shared
from pliant.deployments.serving.catalog.adapter_registry import AdapterRegistry
from pliant.deployments.serving.catalog.board import Seen
from pliant.deployments.serving.catalog.registry import RejectedError
from pliant.deployments.serving.catalog.task_registry import TaskRegistry
from pliant.deployments.serving.conductor import Conductor
from pliant.deployments.serving.messages import (
    AdapterNews,
    BoardNews,
    Guidance,
    News,
    Registered,
    RegisteredTask,
    Rejected,
    Step,
    TaskNews,
)
from pliant.deployments.serving.router import caller, obey
from pliant.deployments.serving.starting_replicas import StartingReplicas
from pliant.formats.profile import Profile
from pliant.formats.vision_task import TaskRef
from pliant.models import sources

logger = logging.getLogger("pliant")

Handle = DeploymentHandle[Any]

_STEP_S = 0.2
_ANSWER_WITHIN_S = 1.0
_NEWS_WITHIN_S = 5.0
_RETRY_S = 1.0
_CALL_WITHIN_S = 60.0


class Planner:
    """Runs a conductor for each classifier, exchanges news for guidance with gateways; registers adapters and tasks."""

    def __init__(self, config: ServingConfig, handles: Mapping[str, Handle]) -> None:
        self._conductors: dict[str, Conductor] = {}
        self._life = uuid.uuid4().hex
        self._changes = 0
        self._change = asyncio.Event()
        self._starting = StartingReplicas()
        self._followed = False
        self._adapters = AdapterRegistry(config)
        self._vision_tasks = TaskRegistry(config)
        self._tasks = [
            asyncio.create_task(self._conduct(name, service, handles[name]))
            for name, service in config.of(EncoderConfig).items()
        ]
        self._config = config
        self._handles = handles
        self._cascades = CascadeRegistry(config, self._level, _run_on(config), _compiling(config))

    async def exchange(self, seen: str, news: Mapping[str, News]) -> tuple[str, dict[str, Guidance]]:
        """Take a gateway's `news` by service; answer as soon as there is something newer than it has `seen`.

        Answers after a second in any case, so that news keep coming. The first element is what the gateway has seen
        then.
        """
        self._followed = True
        for name, told in news.items():
            if name in self._conductors:
                self._conductors[name].hear(told)
        if seen == self._state:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), _ANSWER_WITHIN_S)
        guidance = {name: conductor.guidance() for name, conductor in self._conductors.items()}
        for name, steps in self._starting.now().items():
            guidance[name] = replace(guidance.get(name, Guidance()), starting=steps)
        return self._state, guidance

    async def starting(self, service: str, replica: str, step: Step | None) -> bool:
        """What a replica of `service` does that cannot answer yet; None once it can. Whether a gateway runs."""
        self._starting.hear(service, replica, step)
        self._changed()
        return self._followed

    async def adapter_news(self, gateway: str, seen: Seen, wait: bool) -> AdapterNews:
        """What became of adapters since `seen`: now, or else as soon as there is something, or after some seconds."""
        await self._adapters.started()
        return await self._adapters.board.follow(gateway, seen, _NEWS_WITHIN_S if wait else 0)

    async def load_adapter(self, name: str, path: str, service: str | None, in_place: bool) -> Registered | Rejected:
        """See `AdapterRegistry.load`."""
        try:
            return await self._adapters.load(name, path, service, in_place)
        except RejectedError as error:
            return error.rejected

    async def unload_adapter(self, name: str) -> Registered | Rejected:
        """See `AdapterRegistry.unload`."""
        try:
            return await self._adapters.unload(name)
        except RejectedError as error:
            return error.rejected

    async def task_news(
        self, follower: str, seen: Seen, wait: bool, failed: Mapping[TaskRef, str] = MappingProxyType({})
    ) -> TaskNews:
        """What became of tasks since `seen`: now, or else as soon as there is something, or after some seconds.

        Gateways and replicas follow; a replica has seen a task when it has it in memory, or says why it `failed`.
        """
        await self._vision_tasks.started()
        return await self._vision_tasks.board.follow(follower, seen, _NEWS_WITHIN_S if wait else 0, failed)

    async def load_task(self, service: str, name: str, path: str, replace: bool) -> RegisteredTask | Rejected:
        """See `TaskRegistry.load`."""
        try:
            return await self._vision_tasks.load(service, name, path, replace)
        except RejectedError as error:
            return error.rejected

    async def unload_task(self, service: str, name: str) -> RegisteredTask | Rejected:
        """See `TaskRegistry.unload`."""
        try:
            return await self._vision_tasks.unload(service, name)
        except RejectedError as error:
            return error.rejected

    async def cascade_news(self, follower: str, seen: Seen, wait: bool) -> BoardNews[CascadeEntry]:
        """What became of cascades since `seen`: now, or else as soon as there is something, or after some seconds."""
        return await self._cascades.board.follow(follower, seen, _NEWS_WITHIN_S if wait else 0)

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """How many replicas each service should have, for `deployments/autoscaling.py`."""
        wanted = {name: conductor.wanted() for name, conductor in self._conductors.items()}
        return {name: replicas for name, replicas in wanted.items() if replicas is not None}

    def check_health(self) -> None:
        """Serve replaces a planner whose conductors or cascades have ended, or whose registries could not start."""
        self._adapters.check()
        self._vision_tasks.check()
        self._cascades.check()
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"a conductor has ended: {task}")

    @property
    def _state(self) -> str:
        return f"{self._life}-{self._changes}"

    def _changed(self) -> None:
        self._changes += 1
        self._change.set()
        self._change = asyncio.Event()

    async def _level(self, name: str) -> Classifier:
        """A service as gateways call it, for profiles; its conductor has made the handle ready."""
        config = self._config.of(EncoderConfig)[name]
        folder = await asyncio.to_thread(sources.fetch, config.model)
        table, call = shared(name, config.slo_ms / 1e3), caller(self._handles[name].infer.remote)
        return Classifier(name, config, folder, sources.describe(folder), table, call, Unrecorded())

    async def _conduct(self, name: str, config: EncoderConfig, handle: Handle) -> None:
        obey(handle)
        table = shared(name, config.slo_ms / 1e3)
        conductor = None
        while True:
            try:
                if conductor is not None:
                    await conductor.step()
                elif lengths := await _lengths(name, config, table, handle):
                    conductor = Conductor(name, config, lengths, table, _Calls(handle), self._changed)
                    self._conductors[name] = conductor
                await asyncio.sleep(_STEP_S if conductor else _RETRY_S)
            except Exception:
                logger.exception("%s: planning failed; trying again", name)
                await asyncio.sleep(_RETRY_S)


def _run_on(config: ServingConfig) -> Callable[[str], list[str]]:
    """What the replicas of a service say they run on."""
    return lambda name: run_on(shared(name, config.of(EncoderConfig)[name].slo_ms / 1e3).reports().values())


def _compiling(config: ServingConfig) -> Callable[[str], bool]:
    """Whether some replica of a service says that it compiles."""

    def compiling(name: str) -> bool:
        reports = shared(name, config.of(EncoderConfig)[name].slo_ms / 1e3).reports().values()
        return any(report["compiling"] for report in reports)

    return compiling


async def _lengths(service: str, config: EncoderConfig, table: RoutingTable, handle: Handle) -> Lengths | None:
    """What the service's replicas may hold; for `lengths: auto` it follows from what most replicas have profiled.

    None while no replica can say.
    """
    if config.lengths:
        return Lengths(config.lengths, None)
    async with asyncio.timeout(_CALL_WITHIN_S):
        answers = await asyncio.gather(
            *(handle.profile.remote(Assignment(replica, 0)) for replica in table.reports()), return_exceptions=True
        )
    profiles = sorted((answer for answer in answers if isinstance(answer, Profile)), key=lambda profile: profile.device)
    if not profiles:
        return None
    devices = Counter(profile.device for profile in profiles)
    device = devices.most_common(1)[0][0]
    if len(devices) > 1:
        logger.warning("%s: replicas run on %s; lengths are chosen for %s", service, ", ".join(devices), device)
    return Lengths(None, next(profile for profile in profiles if profile.device == device))


class _Calls:
    """Calls to the replica that an assignment names."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def hold(self, assignment: Assignment) -> Report:
        report: Report = await self._handle.hold.remote(assignment)
        return report
