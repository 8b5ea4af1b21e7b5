"""Services that take a prompt, choose who answers it, and count what became of that.

Plain asyncio, without Ray. Those that answer are services that have clients of their own, too.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from pliant.deployments.http.prompts import Asked, mark
from pliant.deployments.serving.outcome import Fault, Outcome, Recorder, RequestError, Trouble, counted, trouble_of
from pliant.deployments.serving.services import Service
from pliant.deployments.serving.tenants import current, in_background

T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R")

Reason = Trouble | Literal["absent"]
"""Why another one answers than should: what was the matter with what was to choose, or whoever should answer is not
there or ready."""


class PassingRecorder(Recorder, Protocol):
    """Where it is recorded what became of a request."""

    def passed(self, model: str) -> None:
        """To `model`, which is to answer."""

    def instead(self, reason: Reason) -> None:
        """Another one than should is to answer."""

    def took(self, seconds: float) -> None:
        """The whole answer, from when the request came."""


@dataclass(frozen=True)
class Passed(Generic[T]):
    """Who answers a request; a `PassedOn`."""

    model: T
    mark: str
    warning: str | None
    came: float
    """When the request did, by the clock."""
    recorder: PassingRecorder

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


class Passing(ABC):
    """A `Router` that may choose any of `models`, within `slo_ms`; `otherwise` answers where that is not done.

    A client needs the right to use the service, and none to use what it is made of.
    """

    def __init__(
        self, name: str, models: Iterable[str], slo_ms: float, otherwise: Service, recorder: PassingRecorder
    ) -> None:
        self.name = name
        self.created = int(time.time())
        self._slo_ms = slo_ms
        self._otherwise = otherwise
        self._recorder = recorder
        self._models = {mark(model): model for model in models}
        self._passed: Counter[str] = Counter()
        self._instead: Counter[Reason] = Counter()

    @property
    def ready(self) -> bool:
        return self._otherwise.ready

    @property
    def max_length(self) -> int:
        """Of whoever answers otherwise; 0 until that can be said."""
        return int(self._otherwise.endpoint.max_length) if self._otherwise.endpoint else 0

    @abstractmethod
    async def _choose(self, text: str, asked: Asked[T]) -> tuple[str, T, str | None]:
        """The name of who answers what is `asked`, the text of which is `text`, what is found for it, and why it is not
        the one that should."""

    async def pass_on(self, asked: Asked[T], answered_by: str | None = None) -> Passed[T]:
        came = time.monotonic()
        with counted(self._recorder) as ending:
            if answered_by is None:
                name, model, warning = await self._choose(asked.text, asked)
            else:
                name, warning = self._marked(answered_by), None
                model = await asked.find(name)
            ending.outcome = None
        self._passed[name] += 1
        self._recorder.passed(name)
        return Passed(model, mark(name), warning, came, self._recorder)

    @property
    def _within_ms(self) -> float:
        """What the client lets the choice take."""
        return current().slo_ms(self._slo_ms)

    async def _tried(self, attempt: Awaitable[R]) -> tuple[R | None, Trouble | None]:
        """What comes of `attempt`, or else what was the matter, if it is not done in time.

        Raises RequestError if others are too busy for a request that nobody waits for: it is sent again.
        """
        try:
            async with asyncio.timeout(self._within_ms / 1e3):
                return await attempt, None
        except TimeoutError:
            return None, "late"
        except RequestError as error:
            trouble = trouble_of(error)
            if trouble == "busy" and in_background():
                raise
            return None, trouble

    def _other(self, reason: Reason) -> None:
        """Count that another one answers than should."""
        self._instead[reason] += 1
        self._recorder.instead(reason)

    @staticmethod
    def _check_up(service: Service) -> None:
        """Raise RequestError if `service` cannot answer."""
        if not service.ready:
            raise RequestError(Outcome.UNAVAILABLE, f"{service.name} is down", fault=Fault.DOWN)

    def _marked(self, found: str) -> str:
        """Who answered before."""
        if model := self._models.get(found):
            return model
        reason = f"Last-Event-ID: nobody that {self.name} passes on to gave this answer; ask again from the start"
        raise RequestError(Outcome.REJECTED, reason, fault=Fault.CONFLICT)
