"""The config of cascades of text classifiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from pliant.config.base import Example, Milliseconds, ServiceConfig, Strict
from pliant.config.encoder import EXAMPLE_QUERY, EXAMPLE_TEXT, EncoderConfig
from pliant.errors import DataError
from pliant.models import sources
from pliant.training import labelled_texts

LevelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(@(0|[1-9][0-9]*))?$")]


class ConformalConfig(Strict):
    """How rarely answers that a cascade gives early may differ from the most accurate level's, for certain."""

    epsilon: Annotated[float, Field(gt=0, lt=1)]
    """The most of them that may, as a share."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The chance that the labelled texts misled us about it."""


class LevelAt(NamedTuple):
    """Where a level of a cascade is."""

    service: str
    exit: int | None
    """Behind how many layers of the service's model; None: it is the whole model."""


def level_at(level: str) -> LevelAt:
    """What the name of a level says: topics, or topics@2."""
    service, _, layers = level.partition("@")
    return LevelAt(service, int(layers) if layers else None)


class CascadeConfig(ServiceConfig):
    """A text classifier that asks small models first, and larger ones where they are not sure (Tabi)."""

    kind: Literal["cascade"]
    levels: Annotated[tuple[LevelName, ...], Field(min_length=2, max_length=5)]
    """Encoder services of the same file, in rising accuracy; others may use them, too. topics@2 is the exit behind
    layer 2 of topics: a text that goes on from there to another exit of topics, or to all of it, is computed on from
    there, in the same pass.

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
    down or late; from the fastest level of another service when the first one is; and with the closest there is to an
    accuracy that cannot be had. Such answers say so."""
    prune: bool = True
    """Leave out words that an earlier level hardly attended to, before a later one reads a text."""
    conformal: ConformalConfig | None = None
    check: Annotated[float, Field(ge=0, le=0.1)] = 0.01
    """Of the answers that are given before the last level, how many that one is asked for, too, where they hardly
    have to wait: whether they are still what it would say."""
    seed: int = 0
    """Of the choice which texts go on to the next level; the same text always takes the same way."""

    @model_validator(mode="after")
    def _consistent(self) -> CascadeConfig:
        if (self.accuracy_loss is None) == (self.accuracy_target is None):
            raise ValueError("needs either accuracy_loss, such as 0.01, or accuracy_target, such as 0.9")
        if len(set(self.levels)) != len(self.levels):
            raise ValueError("levels: each may be there once")
        return self

    @property
    def ats(self) -> tuple[LevelAt, ...]:
        """Where the levels are."""
        return tuple(level_at(level) for level in self.levels)

    def exits(self, service: str) -> tuple[int, ...]:
        """Of the service, behind how many layers those are that are levels."""
        return tuple(at.exit for at in self.ats if at.service == service and at.exit is not None)

    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(at.service for at in self.ats))

    def settings_of_parts(self) -> Mapping[str, Mapping[str, Any]]:
        """To prune, all whole models but the last may have to say which words are important."""
        whole = [at.service for at in self.ats if at.exit is None]
        telling = {service: {"importance": True} for service in whole[:-1]} if self.prune else {}
        leaving = {service: {"exit_levels": True} for service in self.parts() if self.exits(service)}
        return {service: {**telling.get(service, {}), **leaving.get(service, {})} for service in telling | leaving}

    def _first(self, service: str) -> int:
        """Which level is the first of the service."""
        return [at.service for at in self.ats].index(service)

    def labels(self, services: Mapping[str, ServiceConfig]) -> tuple[str, ...]:
        return services[self.parts()[0]].labels(services)

    def conflicts(self, services: Mapping[str, ServiceConfig]) -> Iterator[str]:
        encoders = _encoders(services)
        there = ", ".join(encoders) or "none"
        layers: dict[str, float] = {}
        for index, (level, at) in enumerate(zip(self.levels, self.ats, strict=True)):
            if at.service not in encoders:
                kind = services[at.service].kind if at.service in services else "no service"
                yield f"levels.{index}: got {level}, {kind}; must be an encoder service: {there}"
            elif at.exit is not None and encoders[at.service].exits:
                yield (
                    f"levels.{index}: {level} is to have a cut-off of this cascade, and texts of {at.service} leave at "
                    f"one of its own; leave out exits: true there, or name {at.service} alone"
                )
            behind = math.inf if at.exit is None else at.exit
            if layers.get(at.service, 0) > behind:
                yield f"levels.{index}: {level} comes before what the text has been through; list exits in rising order"
            layers[at.service] = behind
        cutting = ""
        for level in self.parts():
            index = self._first(level)
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
        infos = {service: sources.check(encoders[service].model) for service in self.parts()}
        first, labels = self.parts()[0], set(infos[self.parts()[0]].labels)
        shortest: float = math.inf
        for level, info in infos.items():
            index = self._first(level)
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

        def exits(service: str) -> tuple[int, ...]:
            return sources.check_exits(encoders[service].model).after

        for index, at in enumerate(self.ats):
            if at.exit is not None and at.exit not in (there := exits(at.service)):
                return (
                    f"levels.{index}: got {self.levels[index]}; {at.service} has exits behind layers "
                    f"{', '.join(map(str, there))}, and all of it is {at.service}"
                )
        try:
            labelled_texts.read(self.data, labels)
        except DataError as error:
            return f"data: {error}"
        return None

    def example(self, name: str) -> Example:
        pair = {"text": EXAMPLE_QUERY, "text_pair": EXAMPLE_TEXT}
        given = pair if labelled_texts.are_pairs(self.data) else EXAMPLE_TEXT
        return Example(f"models/{name}", {"inputs": given, "parameters": {"top_k": 2, "details": True}})


def _encoders(services: Mapping[str, ServiceConfig]) -> dict[str, EncoderConfig]:
    return {name: service for name, service in services.items() if isinstance(service, EncoderConfig)}
