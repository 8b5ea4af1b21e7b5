"""Vision transformers that trade tokens for time (OTAS)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

from fastapi import APIRouter
from prometheus_client.core import Metric

from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.config.vision import VisionConfig
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.kind import Ask, Kind, Opening, Planning
from pliant.deployments.serving.panels import Panel, Readings
from pliant.deployments.serving.services import Answers, Service, Services
from pliant.deployments.vision import panels, task_routes
from pliant.deployments.vision.endpoint import VisionClassifier
from pliant.deployments.vision.messages import RegisteredTask
from pliant.deployments.vision.metrics import ImageMetrics, vision_metrics
from pliant.deployments.vision.task_follower import TaskFollower
from pliant.deployments.vision.task_registry import TaskRegistry
from pliant.deployments.vision.valuer import ImageValuer
from pliant.models import sources
from pliant.models.vision_info import read_vision


class VisionKind(Kind[VisionConfig]):
    config = VisionConfig
    answers: ClassVar[Answers] = "images"

    def replica(self) -> type:
        from pliant.deployments.vision.replica import VisionReplica

        return VisionReplica

    def most_ongoing(self, config: VisionConfig) -> int:
        return max(super().most_ongoing(config), 3 * config.queue)

    async def open(self, opening: Opening[VisionConfig]) -> VisionClassifier:
        folder = await opening.fetch(sources.fetch_vision)
        recorder = ImageMetrics(opening.name, self.name, opening.outcomes, opening.tally)
        tasks = cast(TaskFollower, opening.follower)
        return VisionClassifier(
            opening.name,
            opening.config,
            read_vision(folder),
            opening.gateway.max_megapixels,
            tasks,
            opening.table,
            opening.caller(recorder),
            recorder,
        )

    def follower(self, ask: Ask, config: ServingConfig) -> TaskFollower:
        return TaskFollower(ask)

    def part(self, planning: Planning) -> CatalogPart[RegisteredTask]:
        return CatalogPart(TaskRegistry(planning.config))

    def valuer(self, config: VisionConfig) -> ImageValuer:
        return ImageValuer()

    def routers(
        self, services: Services, follower: CatalogFollower[Any] | None, gateway: GatewayConfig
    ) -> Sequence[APIRouter]:
        return [task_routes.router(services, cast(TaskFollower, follower), round(gateway.max_body_mb * 2**20))]

    def facts(self, service: Service, follower: CatalogFollower[Any] | None) -> Mapping[str, Any]:
        tasks = cast(TaskFollower, follower)
        return {"tasks": [entry.task.name for entry in tasks.of(service.name)], "problems": list(tasks.problems)}

    def readings(self, report: Mapping[str, Any]) -> Readings:
        return panels.readings(report)

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        return panels.panels(view, past)

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        return vision_metrics(services)


KIND = VisionKind()
