"""One cascade of language models as the gateway sees it: have the small one begin, and find who goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.deployments.http.passing.router import Passing, PassingRecorder
from pliant.deployments.http.prompts import Asked
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.services import Service
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
        super().__init__(name, config.levels, config.slo_ms, large, recorder)
        self._small = small
        self._entry = entry

    @property
    def state(self) -> str:
        """For people."""
        if not self.ready:
            return f"waits for {self._otherwise.name} ({self._otherwise.state})"
        entry = self._entry()
        told = entry.state if entry else "waits for the planner"
        return told if self._escalation else f"{self._otherwise.name} answers all; {told}"

    @property
    def _escalation(self) -> Escalation | None:
        entry = self._entry()
        return entry.choice if entry else None

    async def _choose(self, text: str, asked: Asked[T]) -> tuple[str, T, str | None]:
        escalation = self._escalation
        if escalation and escalation.rule and (small := await self._sure(asked, escalation.rule)):
            return self._small.name, small, None
        return self._otherwise.name, await asked.find(self._otherwise.name), None

    async def _sure(self, asked: Asked[T], rule: Rule) -> T | None:
        """The small model, if it is sure enough of its answer."""

        async def begin() -> T | None:
            self._check_up(self._small)
            beginning = await asked.begin(await asked.find(self._small.name), rule.tokens)
            if rule.sure(beginning.logprobs):
                return await beginning.go_on()
            await beginning.drop()
            return None

        small, trouble = await self._tried(begin())
        if trouble:
            self._other(trouble)
        return small

    def facts(self) -> dict[str, Any]:
        """For people and Prometheus."""
        entry, escalation = self._entry(), self._escalation
        return {
            "state": self.state,
            "problem": entry.problem if entry else None,
            "small": self._small.name,
            "large": self._otherwise.name,
            "chosen": {**escalation._asdict(), "rule": str(escalation.rule or "none")} if escalation else None,
            "passed": dict(self._passed),
            "instead": dict(self._instead),
        }
