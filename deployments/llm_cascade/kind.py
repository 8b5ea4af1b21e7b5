"""Cascades of language models: a small one answers what it is sure enough of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, cast

from prometheus_client.core import Metric

from pliant.config.cluster import ServingConfig
from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.deployments.http.passing.metrics import PassingMetrics, passing_metrics
from pliant.deployments.llm_cascade.endpoint import LlmCascade
from pliant.deployments.llm_cascade.planner import LlmCascadePart
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.choosing.follower import ChoiceFollower
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.kind import Ask, Kind, Opening, Planning
from pliant.deployments.serving.panels import Bars, Panel
from pliant.deployments.serving.services import Answers, Service


class LlmCascadeKind(Kind[LlmCascadeConfig]):
    config = LlmCascadeConfig
    answers: ClassVar[Answers] = "prompts"

    async def open(self, opening: Opening[LlmCascadeConfig]) -> LlmCascade:
        config, parts = opening.config, opening.parts
        recorder = PassingMetrics(opening.name, self.name, opening.outcomes)
        known = partial(cast(ChoiceFollower, opening.follower).known_as, opening.name)
        return LlmCascade(opening.name, config, parts[config.small], parts[config.large], known, recorder)

    def follower(self, ask: Ask, config: ServingConfig) -> ChoiceFollower:
        return ChoiceFollower(ask, "cascades of language models")

    def part(self, planning: Planning) -> LlmCascadePart:
        return LlmCascadePart(planning)

    def facts(self, service: Service, follower: CatalogFollower[Any] | None) -> Mapping[str, Any]:
        return cast(LlmCascade, service.endpoint).facts() if service.endpoint else {}

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        if "small" in view:
            yield Bars("Requests by who answers", {view["small"]: 0, view["large"]: 0, **view["passed"]})
            yield Bars(f"Answered by {view['large']} as {view['small']} could not begin, by why", view["instead"])

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        return passing_metrics(services)


KIND = LlmCascadeKind()
