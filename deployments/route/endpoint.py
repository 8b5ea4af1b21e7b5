"""One route as the gateway sees it: have a classifier label the prompt, and find who answers prompts of this label.

Plain asyncio, without Ray. The classifier and those that answer are services that have clients of their own, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from pliant.config.route import RouteConfig
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.prompts import mark
from pliant.deployments.http.texts import TextClassifier
from pliant.deployments.serving.outcome import (
    BECAUSE,
    Fault,
    Outcome,
    Recorder,
    RequestError,
    Trouble,
    counted,
    trouble_of,
)
from pliant.deployments.serving.services import Service
from pliant.deployments.serving.tenants import current, in_background

T = TypeVar("T")
P = TypeVar("P")


Reason = Trouble | Literal["absent"]
"""Why `otherwise` answers: what was the matter with the classifier, or whoever should answer is not there or ready."""


class RouteRecorder(Recorder, Protocol):
    """Where a route records what became of a request."""

    def passed(self, model: str) -> None:
        """To `model`, which is to answer."""

    def instead(self, reason: Reason) -> None:
        """`otherwise` is to answer."""

    def took(self, seconds: float) -> None:
        """The whole answer, from when the request came."""


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """Who answers a request; a `PassedOn`."""

    model: T
    mark: str
    warning: str | None
    came: float
    """When the request did, by the clock."""
    recorder: RouteRecorder

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.came

    async def answer(self, pieces: AsyncGenerator[P, None]) -> AsyncGenerator[P, None]:
        with counted(self.recorder) as ending:
            if self.warning:
                ending.outcome = Outcome.DEGRADED
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece
        self.recorder.took(self.spent_s)


class Route:
    """Passes prompts on: `by` labels them, and `otherwise` answers those that nobody else can.

    A client needs the right to use the route, and none to use what it is made of.
    """

    def __init__(
        self, name: str, config: RouteConfig, by: Service, otherwise: Service, recorder: RouteRecorder
    ) -> None:
        self.name = name
        self.created = int(time.time())
        self._config = config
        self._by = by
        self._otherwise = otherwise
        self._recorder = recorder
        self._models = {mark(model): model for model in (*config.to.values(), config.otherwise)}
        self._passed: Counter[str] = Counter()
        self._instead: Counter[Reason] = Counter()

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

    async def pass_on(
        self, text: str, find: Callable[[str], Awaitable[T]], answered_by: str | None = None
    ) -> Chosen[T]:
        came = time.monotonic()
        with counted(self._recorder) as ending:
            if answered_by is None:
                name, model, warning = await self._choose(text, find)
            else:
                name, warning = self._marked(answered_by), None
                model = await find(name)
            ending.outcome = None
        self._passed[name] += 1
        self._recorder.passed(name)
        return Chosen(model, mark(name), warning, came, self._recorder)

    async def _choose(self, text: str, find: Callable[[str], Awaitable[T]]) -> tuple[str, T, str | None]:
        """The name of who answers, what `find` has for it, and why it is not the one that should."""
        slo_ms = current().slo_ms(self._config.slo_ms)
        otherwise, wanted = self._config.otherwise, ""
        trouble: Trouble = "late"
        try:
            async with asyncio.timeout(slo_ms / 1e3):
                wanted = await self._wanted(text, slo_ms)
                if wanted != otherwise:
                    return wanted, await find(wanted), None
        except TimeoutError:
            pass
        except RequestError as error:
            trouble = trouble_of(error)
            if trouble == "busy" and in_background():
                raise  # nobody waits, and it is sent again
        model = await find(otherwise)
        if wanted == otherwise:
            return otherwise, model, None
        reason: Reason = "absent" if wanted else trouble
        self._instead[reason] += 1
        self._recorder.instead(reason)
        why = f"{wanted}, which was to, is not ready" if wanted else f"{self._by.name} {BECAUSE[trouble]}"
        return otherwise, model, f"{otherwise} answers, as {why}"

    async def _wanted(self, text: str, slo_ms: float) -> str:
        """Who should answer `text`."""
        if not self._by.ready:
            raise RequestError(Outcome.UNAVAILABLE, f"{self._by.name} is down", fault=Fault.DOWN)
        classifier: TextClassifier = self._by.endpoint
        [prediction] = await classifier.classify([text], ClassifyParameters(top_k=1, slo_ms=slo_ms))
        return self._config.to.get(prediction.labels[0], self._config.otherwise)

    def _marked(self, found: str) -> str:
        """Who answered before."""
        if model := self._models.get(found):
            return model
        reason = f"Last-Event-ID: nobody that {self.name} passes on to gave this answer; ask again from the start"
        raise RequestError(Outcome.REJECTED, reason, fault=Fault.CONFLICT)

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
