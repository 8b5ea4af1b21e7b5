"""What replicas of a language model earn: answers within TTFT and TPOT, by their lengths and the speeds reported."""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median

from pliant.config.llm import LlmConfig
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.serving.messages import News
from pliant.deployments.serving.valuer import Value
from pliant.policies.llm.step_cost import StepCost
from pliant.policies.llm.value_curve import Lengths, Objectives, Speeds, carried, value_curve

_KEPT = 0.995
"""Of what is known of lengths, by each request."""


class AnswerValuer:
    """A `serving.valuer.Valuer`."""

    def __init__(self, config: LlmConfig) -> None:
        self._objectives = Objectives(config.slo_ms / 1e3, config.tpot_ms / 1e3 if config.tpot_ms else math.inf)
        self._prompts = _Mean()
        self._answers = _Mean()
        self._cost = StepCost()

    def hear(self, news: News) -> None:
        for tokens, count in news.arrived.items():
            self._prompts.add(tokens * count, count)
        if news.answered:
            self._answers.add(news.tokens, news.answered)

    def value(self, reports: Collection[ReplicaReport], rate: float, spread: float, most: int) -> Value | None:
        for report in reports:
            if step_s := report["step_ms"] / 1e3:
                self._cost.observe(max(1.0, report["tokens_per_s"] * step_s), step_s)
        prefilled = [speed for report in reports if (speed := report.get("prompt_tokens_per_s", 0.0))]
        if not (self._cost.known and prefilled and self._prompts.value and self._answers.value):
            return None
        lengths = Lengths(self._prompts.value * _computed(reports), self._answers.value)
        whole = self._prompts.value + self._answers.value
        speeds = Speeds(
            prompt_token_s=1 / median(prefilled),
            step_s=self._cost.step_s,
            row_s=self._cost.row_s,
            slots=min(min(report["slots"], _held(report, whole)) for report in reports),
        )
        tokens = value_curve(speeds, lengths, self._objectives, rate, most, spread)
        each = carried(speeds, lengths, self._objectives)
        return Value(tokens / (lengths.answer * rate), rate / each if each else float(most))


class _Mean:
    """Of late."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, total: float, count: int) -> None:
        kept = _KEPT**count
        self._sum = kept * self._sum + total
        self._weight = kept * self._weight + count

    @property
    def value(self) -> float:
        """0 before the first."""
        return self._sum / self._weight if self._weight else 0.0


def _computed(reports: Collection[ReplicaReport]) -> float:
    """The share of prompts' tokens that were not there already."""
    missed = sum(report["memory"]["missed"] for report in reports)
    tokens = missed + sum(report["memory"]["hit"] for report in reports)
    return missed / tokens if tokens else 1.0


def _held(report: ReplicaReport, tokens: float) -> int:
    """Answers for which there is memory, if each takes so many tokens with its prompt."""
    memory = report["memory"]
    return max(1, int(memory["pages"] * memory["page"] / tokens))
