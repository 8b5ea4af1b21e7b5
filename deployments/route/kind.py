"""Routes: a classifier chooses which language model or adapter answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, cast

from prometheus_client.core import Metric

from pliant.config.route import RouteConfig
from pliant.deployments.http.passing.metrics import PassingMetrics, passing_metrics
from pliant.deployments.route.endpoint import Route
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.kind import Kind, Opening
from pliant.deployments.serving.panels import Bars, Panel
from pliant.deployments.serving.services import Answers, Service


class RouteKind(Kind[RouteConfig]):
    config = RouteConfig
    answers: ClassVar[Answers] = "prompts"

    async def open(self, opening: Opening[RouteConfig]) -> Route:
        config, parts = opening.config, opening.parts
        recorder = PassingMetrics(opening.name, self.name, opening.outcomes)
        return Route(opening.name, config, parts[config.by], parts[config.otherwise], recorder)

    def facts(self, service: Service, follower: CatalogFollower[Any] | None) -> Mapping[str, Any]:
        return cast(Route, service.endpoint).facts() if service.endpoint else {}

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        if "to" in view:
            yield Bars("Requests by who answers", {view["otherwise"]: 0, **view["passed"]})
            yield Bars(f"Answered by {view['otherwise']} instead of another, by why", view["instead"])

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        return passing_metrics(services)


KIND = RouteKind()
