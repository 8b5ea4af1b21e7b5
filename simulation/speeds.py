"""What `pliant simulate` is told of replicas' speeds, and the services that follow from it, the trace and cluster.yaml.

A file of speeds has for each service what `/stats` of a running cluster, or `pliant profile`, says of its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import yaml
from pydantic import Field, ValidationError, model_validator

from pliant.config.base import ElasticServiceConfig, Strict
from pliant.config.cluster import ServingConfig
from pliant.config.encoder import EncoderConfig
from pliant.config.llm import LlmConfig
from pliant.config.vision import VisionConfig
from pliant.errors import ConfigError
from pliant.policies.cluster.budget import BudgetError, Nodes
from pliant.policies.cluster.placement import first_fit
from pliant.policies.cluster.room import shape_of
from pliant.policies.llm import value_curve as llm
from pliant.simulation import curves
from pliant.simulation.cluster.simulator import Served
from pliant.simulation.cluster.trace import Load

Positive = Annotated[float, Field(gt=0)]
_START_S = 60
_SPARE = 1.3
"""Of what the first minute takes, that there is at the start."""


class ReplicaSpeeds(Strict):
    """Of one replica."""

    start_s: Annotated[float, Field(ge=0)] = 60


class TextSpeeds(ReplicaSpeeds):
    text_ms: Positive
    """That a text takes on average, among others."""


class AnswerSpeeds(ReplicaSpeeds):
    prompt_tokens_per_s: Positive
    step_ms: Positive
    """Of a decode step without rows."""
    row_ms: Annotated[float, Field(ge=0)]
    """More, for each live answer."""
    prompt_tokens: Positive | None = None
    """On average, for a trace without tokens."""
    answer_tokens: Positive | None = None


class ImageSpeeds(ReplicaSpeeds):
    image_ms: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """By gamma, rising."""
    slo_ms: Positive = 600
    """Of images."""
    accuracy: tuple[Annotated[float, Field(gt=0, le=1)], ...]

    @model_validator(mode="after")
    def _rising(self) -> ImageSpeeds:
        if len(self.accuracy) != len(self.image_ms) or list(self.image_ms) != sorted(self.image_ms):
            raise ValueError("image_ms must rise, with an accuracy for each")
        return self


_KINDS: Mapping[type, type[ReplicaSpeeds]] = {
    EncoderConfig: TextSpeeds,
    LlmConfig: AnswerSpeeds,
    VisionConfig: ImageSpeeds,
}


def read(path: Path, config: ServingConfig) -> dict[str, ReplicaSpeeds]:
    """By service. Raises ConfigError, a line for each mistake."""
    try:
        given = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: is no YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(given, dict):
        raise ConfigError([f"{path}: must have the names of services, and the speeds of each"])
    found, problems = {}, []
    for name, speeds in given.items():
        kind = _KINDS.get(type(config.services.get(name)))
        if kind is None:
            able = [each for each, service in config.services.items() if type(service) in _KINDS]
            problems.append(f"{path}: {name}: no service with replicas; there are: {', '.join(able)}")
            continue
        try:
            found[name] = kind.model_validate(speeds)
        except ValidationError as error:
            problems += [
                f"{path}: {'.'.join(map(str, (name, *each['loc'])))}: {each['msg']}" for each in error.errors()
            ]
    if problems:
        raise ConfigError(problems)
    return found


def services(
    config: ServingConfig, loads: Mapping[str, Load], speeds: Mapping[str, ReplicaSpeeds], nodes: list[Nodes]
) -> list[Served]:
    """Those that the trace asks. Raises ConfigError for one that has no speeds, or cannot meet its objectives."""
    problems = []
    for name in loads:
        if name not in config.services:
            problems.append(f"trace: {name} is no service; there are: {', '.join(config.services)}")
        elif type(config.services[name]) not in _KINDS:
            problems.append(f"trace: {name} has no replicas; give what is asked of {config.services[name].parts()}")
        elif name not in speeds:
            problems.append(f"speeds: nothing is said of {name}")
    if problems:
        raise ConfigError(problems)
    return [_served(name, config.services[name], load, speeds[name], nodes) for name, load in loads.items()]


def at_start(services: Sequence[Served], nodes: Sequence[Nodes]) -> dict[str, int]:
    """Replicas with a third more than the first minute takes, less where these do not fit."""
    replicas = {}
    for each in services:
        wanted = math.ceil(_SPARE * float(each.rates[:_START_S].mean()) / each.each)
        replicas[each.name] = min(max(wanted, each.least), each.most)
    while not first_fit([(each.shape, replicas[each.name]) for each in services], nodes):
        most = max(services, key=lambda each: replicas[each.name] - each.least)
        if replicas[most.name] == most.least:
            raise BudgetError("the least replicas of all services do not fit")
        replicas[most.name] -= 1
    return replicas


def _served(name: str, config: object, load: Load, speeds: ReplicaSpeeds, nodes: list[Nodes]) -> Served:
    assert isinstance(config, ElasticServiceConfig)
    sizes = config.replica_range()
    assert sizes
    taken = config.resources()
    shape = shape_of(taken.get("num_gpus", 0.0), taken.get("num_cpus", 0.0), nodes)
    elastic = None
    if isinstance(config, EncoderConfig) and isinstance(speeds, TextSpeeds):
        text_s, slo_s = speeds.text_ms / 1e3, config.slo_ms / 1e3
        each, patience_s = 1 / text_s, slo_s - text_s
        curve = curves.texts(text_s, slo_s, sizes.max)
    elif isinstance(config, LlmConfig) and isinstance(speeds, AnswerSpeeds):
        lengths = llm.Lengths(load.prompt or speeds.prompt_tokens or 0.0, load.answer or speeds.answer_tokens or 0.0)
        if not (lengths.prompt and lengths.answer):
            raise ConfigError([f"speeds: {name}: needs prompt_tokens and answer_tokens, as the trace has none"])
        measured = llm.Speeds(
            1 / speeds.prompt_tokens_per_s, speeds.step_ms / 1e3, speeds.row_ms / 1e3, slots=config.slots
        )
        objectives = llm.Objectives(config.slo_ms / 1e3, config.tpot_ms / 1e3 if config.tpot_ms else math.inf)
        each = llm.carried(measured, lengths, objectives)
        patience_s = objectives.ttft_s - llm.prompt_s(measured, lengths)
        curve = curves.answers(measured, lengths, objectives, sizes.max)
    else:
        assert isinstance(config, VisionConfig)
        assert isinstance(speeds, ImageSpeeds)
        row_s, gains = np.array(speeds.image_ms) / 1e3, np.array(speeds.accuracy) / max(speeds.accuracy)
        elastic = curves.elastic(row_s, gains)
        each, patience_s = 1 / float(elastic[0][-1]), 0.0
        curve = curves.images(row_s, gains, sizes.max, speeds.slo_ms / 1e3)
    if patience_s < 0 or each <= 0:
        raise ConfigError([f"speeds: {name}: a replica that has nothing else to do misses its objectives"])
    start = load.counts[:_START_S].mean(keepdims=True)
    worth = config.weight / max(float(load.counts.sum()), 1.0)
    return Served(
        name, shape, sizes.min, sizes.max, speeds.start_s, each, patience_s, load.counts, start, worth, curve, elastic,
        weight=config.weight, batch=config.class_ == "batch",
    )  # fmt: skip
