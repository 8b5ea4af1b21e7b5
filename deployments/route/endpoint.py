"""One route as the gateway sees it: have a classifier label the prompt, and find who answers prompts of this label."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pliant.config.route import RouteConfig
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.passing.router import Passing, PassingRecorder
from pliant.deployments.http.prompts import Asked
from pliant.deployments.http.texts import TextClassifier
from pliant.deployments.serving.outcome import BECAUSE, Fault, Outcome, RequestError, Trouble, trouble_of
from pliant.deployments.serving.services import Service
from pliant.deployments.serving.tenants import current, in_background

T = TypeVar("T")


class Route(Passing):
    """Passes prompts on: `by` labels them, and `otherwise` answers those that nobody else can."""

    def __init__(
        self, name: str, config: RouteConfig, by: Service, otherwise: Service, recorder: PassingRecorder
    ) -> None:
        super().__init__(name, (*config.to.values(), config.otherwise), recorder)
        self._config = config
        self._by = by
        self._otherwise = otherwise

    @property
    def ready(self) -> bool:
        return self._otherwise.ready

    @property
    def state(self) -> str:
        """For people."""
        if not self.ready:
            return f"waits for {self._otherwise.name} ({self._otherwise.state})"
        if not self._by.ready:
            return f"ready; {self._otherwise.name} answers all, as {self._by.name} cannot ({self._by.state})"
        return "ready"

    @property
    def max_length(self) -> int:
        """Of whoever answers otherwise; 0 until that can be said."""
        return int(self._otherwise.endpoint.max_length) if self._otherwise.endpoint else 0

    async def _choose(self, text: str, asked: Asked[T]) -> tuple[str, T, str | None]:
        slo_ms = current().slo_ms(self._config.slo_ms)
        otherwise, wanted = self._config.otherwise, ""
        trouble: Trouble = "late"
        try:
            async with asyncio.timeout(slo_ms / 1e3):
                wanted = await self._wanted(text, slo_ms)
                if wanted != otherwise:
                    return wanted, await asked.find(wanted), None
        except TimeoutError:
            pass
        except RequestError as error:
            trouble = trouble_of(error)
            if trouble == "busy" and in_background():
                raise  # nobody waits, and it is sent again
        model = await asked.find(otherwise)
        if wanted == otherwise:
            return otherwise, model, None
        self._other("absent" if wanted else trouble)
        why = f"{wanted}, which was to, is not ready" if wanted else f"{self._by.name} {BECAUSE[trouble]}"
        return otherwise, model, f"{otherwise} answers, as {why}"

    async def _wanted(self, text: str, slo_ms: float) -> str:
        """Who should answer `text`."""
        if not self._by.ready:
            raise RequestError(Outcome.UNAVAILABLE, f"{self._by.name} is down", fault=Fault.DOWN)
        classifier: TextClassifier = self._by.endpoint
        [prediction] = await classifier.classify([text], ClassifyParameters(top_k=1, slo_ms=slo_ms))
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
