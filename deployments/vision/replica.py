"""The Ray Serve shell of the vision engine: one model on one GPU or a few CPU threads, and all tasks that there are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from ray import serve

from pliant.config.cluster import PLANNER
from pliant.config.vision import VisionConfig
from pliant.deployments.serving.calls import answer
from pliant.deployments.serving.catalog.catalog import Seen
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.messages import CatalogNews
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk
from pliant.deployments.startup import Startup
from pliant.deployments.vision.assembly import Assembled, assemble
from pliant.deployments.vision.messages import Answer, Query, RegisteredTask
from pliant.deployments.vision.metrics import VisionReplicaMetrics
from pliant.deployments.vision.report import ReplicaReport
from pliant.deployments.vision.tasks import TaskReconciler
from pliant.errors import ModelError
from pliant.models import sources
from pliant.models.sources import Progress

logger = logging.getLogger("pliant")

_HANGS_AFTER_S = 60.0
_NEWS_WITHIN_S = 10.0
_RETRY_S = 1.0
_FIRST_ATTEMPTS = 10


class VisionReplica:
    """Answers images; serves when all tasks that the planner knows then are in memory, but those that cannot be."""

    async def __init__(self, service: str, config: VisionConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._service = service
        self._metrics = VisionReplicaMetrics(service)
        async with Startup(service) as startup:
            folder = await asyncio.to_thread(sources.fetch_vision, config.model, progress=startup)
            if config.tasks.folder:
                with suppress(ModelError):  # the planner reports it to clients
                    await asyncio.to_thread(sources.fetch_tasks, config.tasks.folder, startup)
            async with startup.loading(folder):
                self._assembled = await self.assembled(config)
            self._engine = self._assembled.engine
            self._desk = Desk(service, self._engine.classify, compute_s=lambda answer: answer.compute_s)
            self._reconciler = TaskReconciler(service, self._assembled.tasks)
            await self._begin(startup)
        self._following = asyncio.create_task(self._follow_for_ever())
        self._compiling = asyncio.create_task(self._compile()) if self._assembled.compiling else None
        report = self._engine.report()
        logger.info("%s: starts with %d tasks on %s", service, len(report["tasks"]), report["backend"])

    async def assembled(self, config: VisionConfig) -> Assembled:
        """What computes, and the tasks in its memory."""
        return await assemble(self._service, config)

    async def _compile(self) -> None:
        try:
            await self._assembled.compile()
        except Exception:
            logger.exception("%s: answers uncompiled", self._service)

    async def answer(self, parcel: Parcel[Query]) -> Answer | Refusal:
        """See `Desk.one`."""
        return await self._desk.one(parcel)

    async def answers(self, parcel: Parcel[Query]) -> AsyncGenerator[list[tuple[int, Answer | Refusal]], None]:
        """See `Desk.several`."""
        async for part in self._desk.several(parcel):
            yield part

    async def check_health(self) -> None:
        """Serve replaces a replica whose computation hangs or broke down, or that does not follow the planner."""
        self._desk.check()
        if self._engine.failure is not None:
            raise self._engine.failure
        if (seconds := self._engine.computing_s()) > _HANGS_AFTER_S:
            raise RuntimeError(f"one batch has taken {seconds:.0f} s")
        if self._following.done():
            raise RuntimeError(f"the planner is not followed any more: {self._following}")

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers know of a new replica before its first statistics."""
        return dict(self._report())

    async def record_routing_stats(self) -> dict[str, Any]:
        report = self._report()
        self._metrics.record(report)
        return dict(report)

    def _report(self) -> ReplicaReport:
        dropped = dict(self._assembled.useful.dropped())
        failed = {task.name: reason for task, reason in self._reconciler.failed.items()}
        report = self._engine.report()
        return ReplicaReport(
            **report,
            served=report["in_time"] + report["late"],
            compiling=self._assembled.compiling,
            version=0,
            held=self._desk.held.amounts(),
            dropped=dropped,
            failed_tasks=failed,
        )

    async def _begin(self, progress: Progress) -> None:
        """Follow the planner once; one that does not answer for long is done without, as images bring their tasks."""
        progress("loading tasks", 0.0)
        planner = await asyncio.to_thread(serve.get_deployment_handle, PLANNER)  # it asks Serve's controller

        async def news(me: str, seen: Seen, wait: bool) -> CatalogNews[RegisteredTask]:
            news: CatalogNews[RegisteredTask] = await answer(
                planner.ask.remote("vision", "news", me, seen, wait, self._reconciler.failed)
            )
            return news

        self._catalog: CatalogFollower[RegisteredTask] = CatalogFollower(news, "tasks")
        for _ in range(_FIRST_ATTEMPTS):
            if await self._follow(wait=False):
                return
            await asyncio.sleep(_RETRY_S)
        logger.warning("%s: starts without knowing its tasks: the planner does not answer", self._service)

    async def _follow(self, wait: bool) -> bool:
        """Learn which tasks there are, and have them in memory: only then the planner hears that, or of failures."""
        reached = await self._catalog.ask(wait, _NEWS_WITHIN_S)
        await self._reconciler.reconcile(
            [entry.task for entry in self._catalog.known.values() if entry.service == self._service]
        )
        return reached

    async def _follow_for_ever(self) -> None:
        while True:
            if not await self._follow(wait=True):
                await asyncio.sleep(_RETRY_S)
