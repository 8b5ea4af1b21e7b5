"""The Ray Serve shell of the language model's engine: one decode loop on one GPU or a few CPU threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pliant.config.llm import LlmConfig
from pliant.deployments.llm.adapter_loader import AdapterLoadError, AdapterTooLargeError
from pliant.deployments.llm.engine import BrokenError, Engine, TooLongError
from pliant.deployments.llm.fingerprint import fingerprint
from pliant.deployments.llm.loop import EngineLoop, StandstillError
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.llm.metrics import LlmReplicaMetrics
from pliant.deployments.llm.precedence import Precedence
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.llm.spans import steps
from pliant.deployments.serving.bundles import Bundle, Outboxes, Sending
from pliant.deployments.serving.logs import work_on
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.serving.replica import Held
from pliant.deployments.startup import Startup
from pliant.errors import ModelError
from pliant.models import sources
from pliant.policies.llm.decode_admission import BusyError

logger = logging.getLogger("pliant")

T = TypeVar("T")


class LlmReplica:
    """Answers parcels of one generation each. When Serve stops the replica, it first waits for those under way."""

    async def __init__(self, service: str, config: LlmConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._service = service
        self._metrics = LlmReplicaMetrics(service)
        self._held = Held()
        self._outboxes: Outboxes[Piece | Alive | Refusal] = Outboxes()
        self._hangs_after_s = config.timeout_s / 2
        """What is left of an answer's time is another replica's."""
        async with Startup(service) as startup:
            folder = await asyncio.to_thread(sources.fetch, config.model, progress=startup)
            self._fingerprint = await asyncio.to_thread(fingerprint, config, folder)
            if config.adapters and config.adapters.folder and config.adapters.pinned:
                with suppress(ModelError, OSError):  # it is reported when they are pinned
                    await asyncio.to_thread(sources.fetch_adapters, config.adapters.folder, startup)
            async with startup.loading(folder):
                engine = await in_thread_that_ends(lambda: self.engine(config))
                self._loop = EngineLoop(engine, self._hangs_after_s)
        self._precedence = Precedence(self._loop.generate)
        report = self._loop.report()
        logger.info("%s: starts with %d slots of %d tokens", service, report["slots"], report["max_length"])

    def engine(self, config: LlmConfig) -> Engine:
        """What computes, ready for its first answer."""
        from pliant.deployments.llm.assembly import assemble  # with torch, which a replica that waits can do without

        return assemble(config)

    async def generate(self, parcel: Parcel[Generation]) -> AsyncGenerator[Piece | Alive | Refusal, None]:
        """The pieces of an answer, or a refusal."""
        [generation] = parcel.queries
        work_on(parcel.request(0))
        with (
            self._held.of(parcel.gateway, len(generation.prompt) + generation.max_tokens),
            steps(self._service, parcel.trace(0)) as noted,
        ):
            try:
                async with aclosing(self._precedence.generate(generation)) as pieces:
                    async for piece in pieces:
                        if piece and noted:
                            noted.gave(piece)
                        yield piece or Alive()
            except BusyError as error:
                yield Refusal("busy", error.reason, error.retry_after_s)
            except AdapterTooLargeError as error:
                yield Refusal("unable", str(error), outcome=Outcome.REJECTED, fault=Fault.ADAPTER_TOO_LARGE)
            except AdapterLoadError as error:
                yield Refusal("unable", str(error), fault=Fault.ADAPTER_NOT_LOADABLE)
            except ValueError as error:
                fault = Fault.CONTEXT_LENGTH if isinstance(error, TooLongError) else None
                yield Refusal("final", str(error), outcome=Outcome.REJECTED, fault=fault)
            except (BrokenError, StandstillError) as error:
                logger.error("%s: %s: %s", self._service, generation.id, error)
                yield Refusal("failed", str(error))

    async def send(self, parcel: Parcel[Sending[Generation]]) -> int:
        """Have the gateway fetch what `generate` gives; of how many items that was."""
        [sending] = parcel.queries
        return await self._outboxes.send(sending, self.generate(parcel.instead(sending.query)))

    async def bundles(self, parcel: Parcel[str]) -> AsyncGenerator[Bundle[Piece | Alive | Refusal], None]:
        """What there is to fetch in a channel of a gateway's."""
        [channel] = parcel.queries
        async with aclosing(self._outboxes.bundles(channel)) as bundles:
            async for bundle in bundles:
                yield bundle

    async def check_health(self) -> None:
        """Serve replaces a replica whose engine is broken, or computes one step or loads one adapter without end."""
        if self._loop.failure:
            raise self._loop.failure
        if (seconds := self._loop.stepping_s()) > self._hangs_after_s:
            raise RuntimeError(f"one step has taken {seconds:.0f} s")
        if (seconds := self._loop.loading_s()) > self._hangs_after_s:
            raise RuntimeError(f"one load of an adapter has taken {seconds:.0f} s")

    def record_replica_metadata(self) -> dict[str, Any]:
        """What gateways know of a new replica before its first statistics."""
        return dict(self._report())

    async def record_routing_stats(self) -> dict[str, Any]:
        report = self._report()
        self._metrics.record(report)
        return dict(report)

    def _report(self) -> ReplicaReport:
        report = self._loop.report()
        return ReplicaReport(
            version=0,
            held=self._held.amounts(),
            max_length=report["max_length"],
            slots=report["slots"],
            live=report["live"],
            waiting=report["waiting"],
            served=report["served"],
            tokens_per_s=report["tokens_per_s"],
            step_ms=report["step_ms"],
            prompt_tokens_per_s=report["prompt_tokens_per_s"],
            squashed=report["squashed"],
            preempted=report["preempted"],
            bypassed=report["bypassed"],
            prompts=report["prompts"],
            prompts_s=report["prompts_s"],
            tenants=report["tenants"],
            classes=report["classes"],
            predictor=report["predictor"],
            memory=report["memory"],
            digest=report["digest"],
            adapters=report["adapters"],
            fingerprint=self._fingerprint,
        )

    def __del__(self) -> None:
        """Serve calls it when the last answer has ended, and waits for it."""
        if hasattr(self, "_loop"):
            self._loop.close()


async def in_thread_that_ends(function: Callable[[], T]) -> T:
    """What `function` returns. torch keeps the handles of a GPU's libraries by thread, which takes long to make, and
    gives those of a thread that ended to the next: the engine's, before the first request."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="assembly")
    try:
        return await asyncio.get_running_loop().run_in_executor(worker, function)
    finally:
        worker.shutdown(wait=False)
