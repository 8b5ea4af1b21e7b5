"""Cascades of text classifiers: a small model answers when it is sure (Tabi)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, cast

from prometheus_client.core import Metric

from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import ServingConfig
from pliant.deployments.cascade import panels
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.metrics import CascadeMetrics, cascade_metrics
from pliant.deployments.cascade.planner import CascadePart
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.choosing.follower import ChoiceFollower
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.kind import Ask, Kind, Opening, Planning
from pliant.deployments.serving.panels import Panel
from pliant.deployments.serving.services import Answers, Service


class CascadeKind(Kind[CascadeConfig]):
    config = CascadeConfig
    answers: ClassVar[Answers] = "texts"

    async def open(self, opening: Opening[CascadeConfig]) -> CascadeClassifier:
        for level in opening.parts.values():
            await level.opened()
        recorder = CascadeMetrics(opening.name, self.name, opening.outcomes, opening.tally)
        endpoints = {name: level.endpoint for name, level in opening.parts.items()}
        known = partial(cast(ChoiceFollower, opening.follower).known_as, opening.name)
        return CascadeClassifier(
            opening.name, opening.config, endpoints, known, recorder, lambda name: opening.parts[name].asleep
        )

    def follower(self, ask: Ask, config: ServingConfig) -> ChoiceFollower:
        return ChoiceFollower(ask, "cascades")

    def part(self, planning: Planning) -> CascadePart:
        return CascadePart(planning)

    def facts(self, service: Service, follower: CatalogFollower[Any] | None) -> Mapping[str, Any]:
        return cast(CascadeClassifier, service.endpoint).facts() if service.endpoint else {}

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        return panels.panels(view)

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        return cascade_metrics(services)


KIND = CascadeKind()
