"""The config of cascades of text classifiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pliant.config.base import Example, Milliseconds, ServiceConfig, ServiceName, Strict
from pliant.config.encoder import EXAMPLE_TEXT, EncoderConfig
from pliant.errors import DataError
from pliant.models import sources
from pliant.training import labelled_texts


class ConformalConfig(Strict):
    """How rarely answers that a cascade gives early may differ from the most accurate level's, for certain."""

    epsilon: Annotated[float, Field(gt=0, lt=1)]
    """The most of them that may, as a share."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The chance that the labelled texts misled us about it."""


class CascadeConfig(ServiceConfig):
    """A text classifier that asks small models first, and larger ones where they are not sure (Tabi)."""

    kind: Literal["cascade"]
    levels: Annotated[tuple[ServiceName, ...], Field(min_length=2, max_length=5)]
    """Encoder services of the same file, in rising accuracy; others may use them, too.

    If one cuts texts that are too long (`truncate`), those after it must, too.
    """
    data: str
    """Labelled texts that no level has learned from: zoo/topics, or a file of JSON lines {"text": …, "label": …}."""
    accuracy_loss: Annotated[float, Field(ge=0, lt=1)] | None = None
    """How much less accurate than the best level it may be; either this or `accuracy_target`."""
    accuracy_target: Annotated[float, Field(gt=0, lt=1)] | None = None
    """How accurate it must be on the labelled texts."""
    slo_ms: Milliseconds = 1000
    """Latency objective, measured in the gateway, for all levels that read a text together."""
    degrade: bool = False
    """Answer less well rather than not at all: from the levels that have read a text when a later one is overloaded,
    down or late; from the fastest other level alone when the first one is; and with the closest there is to an accuracy
    that cannot be had. Such answers say so."""
    prune: bool = True
    """Leave out words that the first level hardly attended to, before a later level reads a text."""
    conformal: ConformalConfig | None = None
    seed: int = 0
    """Of the choice which texts go on to the next level; the same text always takes the same way."""

    @model_validator(mode="after")
    def _consistent(self) -> CascadeConfig:
        if (self.accuracy_loss is None) == (self.accuracy_target is None):
            raise ValueError("needs either accuracy_loss, such as 0.01, or accuracy_target, such as 0.9")
        if len(set(self.levels)) != len(self.levels):
            raise ValueError("levels: each may be there once")
        return self

    def parts(self) -> tuple[str, ...]:
        return self.levels

    def settings_of_parts(self) -> Mapping[str, Mapping[str, Any]]:
        """To prune, all levels but the last may have to say which words are important."""
        return {level: {"importance": True} for level in self.levels[:-1]} if self.prune else {}

    def labels(self, services: Mapping[str, ServiceConfig]) -> tuple[str, ...]:
        return services[self.levels[0]].labels(services)

    def conflicts(self, services: Mapping[str, ServiceConfig]) -> Iterator[str]:
        encoders = _encoders(services)
        there = ", ".join(encoders) or "none"
        for index, level in enumerate(self.levels):
            if level not in encoders:
                kind = services[level].kind if level in services else "no service"
                yield f"levels.{index}: got {level}, {kind}; must be an encoder service: {there}"
        cutting = ""
        for index, level in enumerate(self.levels):
            if cutting and level in encoders and not encoders[level].truncate:
                yield (
                    f"levels.{index}: {level} refuses texts that are too long, and {cutting}, which reads them before, "
                    "cuts them; set truncate: true for both, or for neither"
                )
            if level in encoders and encoders[level].truncate:
                cutting = level

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        """What keeps the levels from working together, or the labelled texts from telling about them."""
        encoders = _encoders(services)
        infos = {level: sources.check(encoders[level].model) for level in self.levels}
        first, labels = self.levels[0], set(infos[self.levels[0]].labels)
        shortest: float = math.inf
        for index, (level, info) in enumerate(infos.items()):
            if not info.chooses:
                return f"levels.{index}: {level} does not choose one of several labels; a cascade needs models that do"
            if len(set(info.labels)) != len(info.labels):
                return f"levels.{index}: {level} has labels of the same name, {list(info.labels)}; give each its own"
            if differing := labels.symmetric_difference(info.labels):
                return (
                    f"levels.{index}: {level} and {first} need the same labels, in any order; only one of them has "
                    f"{', '.join(sorted(differing)[:5])}"
                )
            longest = encoders[level].longest(info.max_length)
            if index and longest < shortest:
                return (
                    f"levels.{index}: {level} takes at most {longest} tokens, and {first}, which reads texts before, "
                    f"{shortest}; give both the same longest length"
                )
            shortest = min(shortest, longest)
        try:
            labelled_texts.read(self.data, labels)
        except DataError as error:
            return f"data: {error}"
        return None

    def example(self, name: str) -> Example:
        return Example(f"models/{name}", {"inputs": EXAMPLE_TEXT, "parameters": {"top_k": 2, "details": True}})


def _encoders(services: Mapping[str, ServiceConfig]) -> dict[str, EncoderConfig]:
    return {name: service for name, service in services.items() if isinstance(service, EncoderConfig)}
