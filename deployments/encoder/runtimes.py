"""Compiled runtimes for an encoder's engine: which lengths a replica may hold, and where it gets them from."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from pliant import models
from pliant.config import EncoderConfig
from pliant.deployments.encoder.engine import Runtime
from pliant.deployments.encoder.lengths import Lengths
from pliant.errors import ModelError
from pliant.profile import Profile

logger = logging.getLogger("pliant")


class CompiledRuntimes:
    """Runtimes of one service's model, each compiled once per machine.

    With `lengths: auto` the device is profiled first, unless a process on this machine has done so. A model that cannot
    tell which words are important, and should, answers without.
    """

    def __init__(self, config: EncoderConfig) -> None:
        self.profile = None if config.lengths else profile(config)
        lengths = Lengths(config.lengths, self.profile)
        self.lengths = lengths.current
        self.device = device(config)
        self._what: dict[str, Any] = {
            "folder": models.fetch(config.model),
            "device": config.device,
            "dtype": config.dtype,
            "threads": config.threads,
            "dynamic": lengths.dynamic,
        }
        self._model = config.model
        self._telling = config.importance

    def prepare(self, max_length: int) -> None:
        _kernel(self._telling).prepare(max_length=max_length, **self._what)

    def load(self, max_length: int) -> Runtime:
        try:
            return self._load(max_length, self._telling)
        except ModelError as error:
            if not self._telling:
                raise
            untold = error
        plain = self._load(max_length, telling=False)
        self._telling = False
        logger.warning(
            "%s answers, but cascades that begin with it leave out no words; say prune: false there: %s",
            self._model,
            untold,
        )
        return plain

    def _load(self, max_length: int, telling: bool) -> Runtime:
        runtime: Runtime = _kernel(telling).load(max_length=max_length, **self._what)
        return runtime


def _kernel(telling: bool) -> ModuleType:
    """Imports torch, which the application's builder can do without."""
    from pliant.kernels import compiled_classifier, telling_classifier

    return telling_classifier if telling else compiled_classifier


def device(config: EncoderConfig) -> str:
    """What a replica of the service computes on here: the processor, and the version of torch."""
    import torch

    from pliant.kernels.latency_profile import device_name

    return f"{device_name(config.device)}, torch {torch.__version__}"


def profile(config: EncoderConfig, progress: models.Progress | None = None) -> Profile:
    """The latency profile of the service's model on this machine's device; measured only if it is not cached."""
    from pliant.kernels import latency_profile

    folder = models.fetch(config.model)
    return latency_profile.profile(
        folder,
        config.longest(models.describe(folder).max_length),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        progress=progress,
    )
