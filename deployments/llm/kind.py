"""Language models on one fused decode loop (Flover), with many adapters (Chameleon)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from fastapi import APIRouter
from prometheus_client.core import Metric

from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.config.llm import LlmConfig
from pliant.deployments.llm import adapter_routes, openai_routes, panels, vllm_routes
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.llm.adapter_registry import AdapterRegistry
from pliant.deployments.llm.chooser import NearPrefix, Prompted
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.messages import Registered
from pliant.deployments.llm.metrics import AnswerMetrics, llm_metrics
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.llm.served_models import ServedModels
from pliant.deployments.llm.valuer import AnswerValuer
from pliant.deployments.serving.bundles import BundledStreams
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.kind import Ask, Kind, Opening, Planning
from pliant.deployments.serving.panels import Panel, Readings
from pliant.deployments.serving.parcels import Alive, Refusal
from pliant.deployments.serving.services import Answers, Service, Services
from pliant.models import sources


class LlmKind(Kind[LlmConfig]):
    config = LlmConfig
    answers: ClassVar[Answers] = "prompts"

    def replica(self) -> type:
        from pliant.deployments.llm.replica import LlmReplica

        return LlmReplica

    def chooser(self, config: LlmConfig) -> NearPrefix:
        return NearPrefix()

    async def open(self, opening: Opening[LlmConfig]) -> LanguageModel:
        folder = await opening.fetch(sources.fetch)
        recorder = AnswerMetrics(opening.name, self.name, opening.outcomes, opening.tally)
        assert opening.calls
        streams: BundledStreams[Generation, Piece | Alive | Refusal] = BundledStreams(
            partial(opening.calls.call, "send"), partial(opening.calls.stream, "bundles")
        )
        caller: Caller[Prompted, Generation, Piece] = Caller(opening.table, recorder, streams=streams.items)
        info = sources.describe_decoder(folder)
        return LanguageModel(opening.name, opening.config, folder, info, opening.table, caller, recorder)

    def follower(self, ask: Ask, config: ServingConfig) -> AdapterFollower | None:
        return AdapterFollower(ask) if _takes_adapters(config) else None

    def part(self, planning: Planning) -> CatalogPart[Registered] | None:
        return CatalogPart(AdapterRegistry(planning.config)) if _takes_adapters(planning.config) else None

    def valuer(self, config: LlmConfig) -> AnswerValuer:
        return AnswerValuer(config)

    def routers(
        self, services: Services, follower: CatalogFollower[Any] | None, gateway: GatewayConfig
    ) -> Sequence[APIRouter]:
        adapters = cast("AdapterFollower | None", follower)
        most = round(gateway.max_body_mb * 2**20)
        models = ServedModels(services, adapters)
        return (
            openai_routes.router(models, most),
            vllm_routes.router(models, services, most),
            adapter_routes.router(adapters, most),
        )

    def facts(self, service: Service, follower: CatalogFollower[Any] | None) -> Mapping[str, Any]:
        if not (adapters := cast("AdapterFollower | None", follower)):
            return {}
        registered = Counter(entry.service for entry in adapters.known.values())
        return {"adapters": registered[service.name], "problems": list(adapters.problems)}

    def readings(self, report: Mapping[str, Any]) -> Readings:
        return panels.readings(report)

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        return panels.panels(view, past)

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        return llm_metrics(services)


def _takes_adapters(config: ServingConfig) -> bool:
    return any(service.adapters for service in config.of(LlmConfig).values())


KIND = LlmKind()
