"""The Ray Serve shell of the encoder engine: one replica on one GPU or a few CPU threads, and its runtimes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from ray import serve

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.engine import Engine, LoadError, Runtimes
from pliant.deployments.encoder.messages import Answer, Assignment, Query, Report
from pliant.deployments.encoder.metrics import ReplicaMetrics
from pliant.deployments.encoder.runtimes import ModelRuntimes, compile_ahead
from pliant.deployments.encoder.upgrades import CompiledLater, Upgrades
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk, Obedience
from pliant.deployments.startup import Startup
from pliant.formats.profile import Profile
from pliant.models import sources
from pliant.models.revision import interface, revision
from pliant.policies.encoder.planning import even_plan

logger = logging.getLogger("pliant")

_HANGS_AFTER_S = 60.0


class EncoderReplica:
    """Starts with the length that the even plan gives its rank, and holds another when the planner says so.

    One whose rank is beyond those that the service started with begins with the longest (Arlo §4).
    """

    async def __init__(self, service: str, config: EncoderConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        assert context.rank is not None
        self._service = service
        self._metrics = ReplicaMetrics(service)
        self._obedience = Obedience()
        async with Startup(service) as startup:
            fetching = asyncio.to_thread(sources.fetch, config.model, progress=startup)
            folder, _ = await asyncio.gather(fetching, asyncio.to_thread(compile_ahead, config))
            self._revision = await asyncio.to_thread(revision, folder)
            self._reads = interface(folder, sources.describe(folder))
            async with startup.loading(folder):
                self._runtimes = await asyncio.to_thread(self.runtimes, config)
                self._engine = Engine(self._runtimes)
                self._desk = Desk(self._service, self._infer, self._engine.seconds, lambda answer: answer.seconds)
                rank, lengths = context.rank.rank, self._runtimes.lengths
                await self._start(even_plan(lengths, rank + 1)[rank] if rank < config.replicas.min else lengths[-1])
        self._upgrades = None
        if isinstance(self._runtimes, CompiledLater):
            self._upgrades = Upgrades(service, self._engine, self._runtimes)
            self._upgrading = asyncio.create_task(self._upgrades.run())

    async def _start(self, wanted: int) -> None:
        """Hold `wanted`, or else the longest that can be loaded."""
        for length in (wanted, *(length for length in reversed(self._runtimes.lengths) if length != wanted)):
            try:
                report = await self._engine.hold(length)
            except LoadError as failure:
                logger.error("%s: %s", self._service, failure)
            else:
                logger.info("%s: starts with %d tokens on %s", self._service, length, report["backend"])
                return
        reasons = dict.fromkeys(self._engine.report()["failed"].values())
        raise LoadError(f"no runtime could be loaded: {'; '.join(reasons)}")

    def runtimes(self, config: EncoderConfig) -> Runtimes:
        """Where runtimes come from; may take long."""
        return ModelRuntimes(config)

    async def _infer(self, query: Query) -> Answer | Refusal:
        said = await self._engine.infer(query)
        return said if isinstance(said, Refusal) else replace(said, revision=self._revision)

    async def answer(self, parcel: Parcel[Query]) -> Answer | Refusal:
        """See `Desk.one`."""
        return await self._desk.one(parcel)

    async def answers(self, parcel: Parcel[Query]) -> AsyncGenerator[list[tuple[int, Answer | Refusal]], None]:
        """See `Desk.several`."""
        async for part in self._desk.several(parcel):
            yield part

    async def hold(self, assignment: Assignment) -> Report:
        """Switch to other runtimes. Raises LoadError, and OutdatedPlannerError: the replica then holds what it held
        before."""
        self._obedience.check(assignment.epoch)
        await self._engine.hold(assignment.max_length, assignment.lengths)
        if self._upgrades:
            self._upgrades.look()
        return self._report()

    async def profile(self, _assignment: Assignment) -> Profile | None:
        """The latency profile of this replica's device, once there is one that its service's lengths follow from."""
        return self._runtimes.profile

    async def check_health(self) -> None:
        """Serve replaces a replica whose computation hangs, or that could not load any runtime."""
        if (seconds := self._engine.computing_s()) > _HANGS_AFTER_S:
            raise RuntimeError(f"one computation has taken {seconds:.0f} s")
        self._desk.check()
        if self._engine.failure is not None:
            raise self._engine.failure
        if self._upgrades and self._upgrading.done():
            raise RuntimeError(f"nothing is compiled any more: {self._upgrading}")

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers know of a new replica before its first statistics."""
        return dict(self._report())

    async def record_routing_stats(self) -> dict[str, Any]:
        report = self._report()
        self._metrics.waiting.set(report["waiting"], tags={"runtime": str(report["max_length"])})
        return dict(report)

    def _report(self) -> Report:
        held = self._desk.held.amounts()
        return {**self._engine.report(), "reads": self._reads, "revision": self._revision, "held": held}
