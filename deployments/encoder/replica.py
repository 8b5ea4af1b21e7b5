"""The Ray Serve shell of the encoder engine: one replica on one GPU or a few CPU threads, one runtime at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.schema import ReplicaRank

from pliant import models
from pliant.config import EncoderConfig
from pliant.deployments.encoder.engine import Answer, Engine, Query, Refusal, Report, Runtime
from pliant.deployments.metrics import ReplicaMetrics
from pliant.policies.even_plan import even_plan

logger = logging.getLogger("pliant")

_MEASURE_REPEATS = 5
_HANGS_AFTER_S = 60.0


class EncoderReplica:
    """Starts with the length that the even plan gives its rank, and holds another when `hold` says so."""

    async def __init__(self, service: str, config: EncoderConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        assert context.rank is not None
        self._service = service
        self._lengths = config.lengths
        self._id = context.replica_id.unique_id
        self._metrics = ReplicaMetrics(service)
        self._engine = Engine(self._id, *self.runtimes(config))
        await self.reconfigure(None, context.rank)

    def runtimes(self, config: EncoderConfig) -> tuple[Callable[[int], Runtime], Callable[[Runtime], float]]:
        """What loads a runtime for a max_length, and what measures the seconds that it takes for a request."""
        from pliant.kernels import compiled_classifier  # imports torch, which the application's builder can do without

        def load(max_length: int) -> Runtime:
            return compiled_classifier.load(
                models.fetch(config.model),
                max_length,
                device="cuda" if config.gpus else "cpu",
                dtype=config.dtype,
                threads=max(1, round(config.cpus)),
            )

        return load, partial(compiled_classifier.measure, repeats=_MEASURE_REPEATS)

    async def reconfigure(self, _user_config: object, rank: ReplicaRank) -> None:
        """Hold what the even plan gives `rank`; Serve calls this when ranks close up after others have gone."""
        report = await self._engine.hold(even_plan(self._lengths, rank.rank + 1)[rank.rank])
        logger.info("%s rank %d: %d tokens on %s", self._service, rank.rank, report["max_length"], report["backend"])

    async def infer(self, query: Query) -> Answer | Refusal:
        return await self._engine.infer(query)

    async def hold(self, plan: Mapping[str, int]) -> tuple[str, Report]:
        """Switch to the max_length that `plan` gives this replica, if it names it."""
        length = plan.get(self._id)
        return self._id, await self._engine.hold(length) if length else self._engine.report()

    async def check_health(self) -> None:
        """Serve replaces a replica whose computation hangs, or that could not load the runtime it should hold."""
        if (seconds := self._engine.computing_s()) > _HANGS_AFTER_S:
            raise RuntimeError(f"one computation has taken {seconds:.0f} s")
        if self._engine.failure is not None:
            raise self._engine.failure

    def record_replica_metadata(self) -> dict[str, Any]:
        """What routers know of a new replica before its first statistics."""
        return dict(self._engine.report())

    def record_routing_stats(self) -> dict[str, Any]:
        report = self._engine.report()
        self._metrics.waiting.set(report["waiting"], tags={"runtime": str(report["max_length"])})
        return dict(report)
