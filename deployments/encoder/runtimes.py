"""Runtimes for an encoder's engine: which lengths a replica may hold, and where it gets them from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.engine import Runtime
from pliant.deployments.encoder.lengths import Lengths
from pliant.errors import ModelError
from pliant.formats.profile import Profile
from pliant.models import sources

logger = logging.getLogger("pliant")


class ModelRuntimes:
    """Runtimes of one service's model, each compiled once per machine; until then the uncompiled model.

    With `lengths: auto` there is the longest alone until the device is profiled. A model that cannot tell which words
    are important, and should, answers without.
    """

    def __init__(self, config: EncoderConfig) -> None:
        self.profile: Profile | None = None
        """From which the lengths follow, if they do, once it is measured."""
        self._config = config
        self._folder = sources.fetch(config.model)
        self.device = device(config)
        self._importance = config.importance
        self._dynamic = False
        self._held: set[int] = set()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The max_lengths to start with, in rising order."""
        if self._config.lengths or self.profile:
            return Lengths(self._config.lengths, self.profile).current
        return (self._config.longest(sources.describe(self._folder).max_length),)

    def missing(self) -> set[int]:
        """Of `lengths`, and of what was loaded, those that are not compiled yet; the longest until all are known."""
        if not self._config.lengths and not self.profile:
            return set(self.lengths)
        kernel = _kernel(self._importance)
        return {
            length for length in {*self.lengths, *self._held} if not kernel.is_prepared(max_length=length, **self._what)
        }

    def settle_lengths(self) -> None:
        """Profile the device if the lengths follow from that, unless a process on this machine has done so."""
        if not self._config.lengths:
            self.profile = profile(self._config)
            self._dynamic = Lengths(None, self.profile).dynamic
            self._held.clear()

    def compile(self, max_length: int, urgency: Callable[[], float]) -> None:
        """Make `load(max_length)` give a compiled runtime, at low priority. Raises CannotCompileError, ModelError."""
        _kernel(self._importance).prepare(max_length=max_length, urgency=urgency, **self._what)

    def load(self, max_length: int) -> Runtime:
        """The compiled runtime if it is there, or else the uncompiled model. Raises ModelError."""
        self._held.add(max_length)
        try:
            return self._load(max_length, self._importance)
        except ModelError as error:
            if not self._importance:
                raise
            untold = error
        plain = self._load(max_length, importance=False)
        self._importance = False
        logger.warning(
            "%s answers, but cascades that begin with it leave out no words; say prune: false there: %s",
            self._config.model,
            untold,
        )
        return plain

    @property
    def _what(self) -> dict[str, Any]:
        config = self._config
        return {
            "folder": self._folder,
            "device": config.device,
            "dtype": config.dtype,
            "threads": config.threads,
            "dynamic": self._dynamic,
        }

    def _load(self, max_length: int, importance: bool) -> Runtime:
        runtime: Runtime = _kernel(importance).load(max_length=max_length, compiling=False, **self._what)
        return runtime


def _kernel(importance: bool) -> ModuleType:
    """Imports torch, which the application's builder can do without."""
    from pliant.kernels.encoder import compiled_classifier, importance_classifier

    return importance_classifier if importance else compiled_classifier


def device(config: EncoderConfig) -> str:
    """What a replica of the service computes on here: the processor, and the version of torch."""
    import torch

    from pliant.kernels.encoder.latency_profile import device_name

    return f"{device_name(config.device)}, torch {torch.__version__}"


def profile(config: EncoderConfig, progress: sources.Progress | None = None) -> Profile:
    """The latency profile of the service's model on this machine's device; measured only if it is not cached."""
    from pliant.kernels.encoder import latency_profile

    folder = sources.fetch(config.model)
    return latency_profile.profile(
        folder,
        config.longest(sources.describe(folder).max_length),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        progress=progress,
    )
