"""One cascade of language models as the gateway sees it: have the small one begin, and find who goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.deployments.http.passing.router import Passing, PassingRecorder
from pliant.deployments.http.prompts import Asked
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError, Trouble, trouble_of
from pliant.deployments.serving.services import Service
from pliant.deployments.serving.tenants import current, in_background
from pliant.policies.cascade.escalation import Escalation, Rule

T = TypeVar("T")


class LlmCascade(Passing):
    """Passes prompts on to `small` where it is sure enough, by the rule in `entry`, what the planner last said, and to
    `large` otherwise: until there is a rule, while the small one is down, busy or late, and what it does not take.
    """

    def __init__(
        self,
        name: str,
        config: LlmCascadeConfig,
        small: Service,
        large: Service,
        entry: Callable[[], Chosen | None],
        recorder: PassingRecorder,
    ) -> None:
        super().__init__(name, config.levels, recorder)
        self._config = config
        self._small = small
        self._large = large
        self._entry = entry

    @property
    def ready(self) -> bool:
        return self._large.ready

    @property
    def state(self) -> str:
        """For people."""
        if not self.ready:
            return f"waits for {self._large.name} ({self._large.state})"
        entry = self._entry()
        told = entry.state if entry else "waits for the planner"
        return told if self._escalation else f"{self._large.name} answers all; {told}"

    @property
    def max_length(self) -> int:
        """Of the large model; 0 until that can be said."""
        return int(self._large.endpoint.max_length) if self._large.endpoint else 0

    @property
    def _escalation(self) -> Escalation | None:
        entry = self._entry()
        return entry.choice if entry else None

    async def _choose(self, text: str, asked: Asked[T]) -> tuple[str, T, str | None]:
        escalation = self._escalation
        if escalation and escalation.rule and (small := await self._sure(asked, escalation.rule)):
            return self._small.name, small, None
        return self._large.name, await asked.find(self._large.name), None

    async def _sure(self, asked: Asked[T], rule: Rule) -> T | None:
        """The small model, if it is sure enough of its answer."""
        trouble: Trouble = "late"
        try:
            async with asyncio.timeout(current().slo_ms(self._config.slo_ms) / 1e3):
                if not self._small.ready:
                    raise RequestError(Outcome.UNAVAILABLE, f"{self._small.name} is down", fault=Fault.DOWN)
                small = await asked.find(self._small.name)
                return small if rule.sure(await asked.begin(small, rule.tokens)) else None
        except TimeoutError:
            pass
        except RequestError as error:
            trouble = trouble_of(error)
            if trouble == "busy" and in_background():
                raise  # nobody waits, and it is sent again
        self._other(trouble)
        return None

    def facts(self) -> dict[str, Any]:
        """For people and Prometheus."""
        entry, escalation = self._entry(), self._escalation
        return {
            "state": self.state,
            "problem": entry.problem if entry else None,
            "small": self._small.name,
            "large": self._large.name,
            "chosen": {**escalation._asdict(), "rule": str(escalation.rule or "none")} if escalation else None,
            "passed": dict(self._passed),
            "instead": dict(self._instead),
        }
