"""Has both models of each cascade answer its labelled prompts, and chooses when the small one may answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pliant.config.llm import LlmConfig
from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm_cascade.profile import FILES, KEPT, Profile, folder_of, keep, load, profile
from pliant.deployments.serving.choosing.part import PAUSES_S, ChoosingPart
from pliant.deployments.serving.kind import Planning
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.policies.cascade.escalation import Escalation, escalation
from pliant.training import labelled_prompts


class LlmCascadePart(ChoosingPart[LlmCascadeConfig]):
    """The cascades of language models' part of the planner.

    While replicas have another version of a model than is configured, as in the midst of a deploy, a choice is
    provisional.
    """

    def __init__(self, planning: Planning, pauses_s: tuple[float, float] = PAUSES_S) -> None:
        super().__init__(planning, LlmCascadeConfig, KEPT, FILES, pauses_s)
        self._models = planning.config.of(LlmConfig)
        self._profiled_on: dict[str, list[labelled_prompts.LabelledPrompt]] = {}
        self._fingerprints: dict[str, str] = {}
        """By model's service, of what is configured."""

    async def _look(self, config: LlmCascadeConfig, parts: Mapping[str, LanguageModel]) -> None:
        self._fingerprints |= {part: model.fingerprint for part, model in parts.items()}

    def _provisional(self, config: LlmCascadeConfig) -> bool:
        return any(
            report.get("fingerprint", self._fingerprints[model]) != self._fingerprints[model]
            for model in config.parts()
            for report in self._planning.tables[model].reports().values()
        )

    async def _others(self, name: str, config: LlmCascadeConfig) -> bool:
        return await asyncio.to_thread(labelled_prompts.read, config.data) != self._profiled_on[name]

    async def _choose(
        self, name: str, config: LlmCascadeConfig, parts: Mapping[str, LanguageModel], provisional: bool
    ) -> Escalation:
        prompts = await asyncio.to_thread(labelled_prompts.read, config.data)
        self._profiled_on[name] = prompts
        small, large = parts[config.small], parts[config.large]
        folder = folder_of(name, config, [small.fingerprint, large.fingerprint], prompts)

        async def measure() -> Profile:
            progress = self._progress(name, "profiles its models")
            found = await profile(small, large, prompts, config.answer_tokens, progress)
            if self._provisional(config) and not provisional:
                raise RequestError(Outcome.UNAVAILABLE, "another version of a model came while they were profiled")
            return found

        found = await self._profiled(name, folder, load, measure, None if provisional else keep)
        return escalation(found.answered, config.loss, config.delta)

    def _told(self, name: str, choice: Any) -> str:
        config = self._planning.config.of(LlmCascadeConfig)[name]
        small, large = config.levels
        if not choice.rule:
            few = f"; {choice.fewest} prompts or more are needed" if choice.prompts < choice.fewest else ""
            return f"serves {large} alone: {choice.prompts} prompts do not show what {small} may answer{few}"
        worse = f"{choice.worse:.1%} of {choice.prompts} answers got worse"
        return f"serves {small} → {large}: {small} answers {choice.early:.0%}, by the {choice.rule}; {worse}"
