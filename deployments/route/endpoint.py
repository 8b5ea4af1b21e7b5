"""One route as the gateway sees it: have a classifier label the prompt, and find who answers prompts of this label."""

from __future__ import annotations

from typing import Any, TypeVar

from pliant.config.route import RouteConfig
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.passing.router import Passing, PassingRecorder
from pliant.deployments.http.prompts import Asked
from pliant.deployments.http.texts import TextClassifier
from pliant.deployments.serving.outcome import BECAUSE
from pliant.deployments.serving.services import Service

T = TypeVar("T")


class Route(Passing):
    """Passes prompts on: `by` labels them, and `otherwise` answers those that nobody else can."""

    def __init__(
        self, name: str, config: RouteConfig, by: Service, otherwise: Service, recorder: PassingRecorder
    ) -> None:
        super().__init__(name, (*config.to.values(), config.otherwise), config.slo_ms, otherwise, recorder)
        self._config = config
        self._by = by

    @property
    def state(self) -> str:
        """For people."""
        if not self.ready:
            return f"waits for {self._otherwise.name} ({self._otherwise.state})"
        if not self._by.ready:
            return f"ready; {self._otherwise.name} answers all, as {self._by.name} cannot ({self._by.state})"
        return "ready"

    async def _choose(self, text: str, asked: Asked[T]) -> tuple[str, T, str | None]:
        otherwise, wanted = self._config.otherwise, ""

        async def find() -> T | None:
            nonlocal wanted
            wanted = await self._wanted(text)
            return None if wanted == otherwise else await asked.find(wanted)

        found, trouble = await self._tried(find())
        if found is not None:
            return wanted, found, None
        model = await asked.find(otherwise)
        if trouble is None:
            return otherwise, model, None
        self._other("absent" if wanted else trouble)
        why = f"{wanted}, which was to, is not ready" if wanted else f"{self._by.name} {BECAUSE[trouble]}"
        return otherwise, model, f"{otherwise} answers, as {why}"

    async def _wanted(self, text: str) -> str:
        """Who should answer `text`."""
        self._check_up(self._by)
        classifier: TextClassifier = self._by.endpoint
        [prediction] = await classifier.classify([text], ClassifyParameters(top_k=1, slo_ms=self._within_ms))
        return self._config.to.get(prediction.labels[0], self._config.otherwise)

    def facts(self) -> dict[str, Any]:
        """For people and Prometheus."""
        config = self._config
        return {
            "by": config.by,
            "to": config.to,
            "otherwise": config.otherwise,
            "passed": dict(self._passed),
            "instead": dict(self._instead),
        }
