"""Compiled runtimes for an encoder's engine: which lengths a replica may hold, and where it gets them from."""

from __future__ import annotations

from typing import Any

from pliant import models
from pliant.config import EncoderConfig
from pliant.deployments.encoder.engine import Runtime
from pliant.deployments.encoder.lengths import Lengths
from pliant.profile import Profile


class CompiledRuntimes:
    """Runtimes of one service's model, each compiled once per machine.

    With `lengths: auto` the device is profiled first, unless a process on this machine has done so.
    """

    def __init__(self, config: EncoderConfig) -> None:
        self.profile = None if config.lengths else profile(config)
        lengths = Lengths(config.lengths, self.profile)
        self.lengths = lengths.current
        self._what: dict[str, Any] = {
            "folder": models.fetch(config.model),
            "device": config.device,
            "dtype": config.dtype,
            "threads": config.threads,
            "dynamic": lengths.dynamic,
        }

    def prepare(self, max_length: int) -> None:
        from pliant.kernels import compiled_classifier  # imports torch, which the application's builder can do without

        compiled_classifier.prepare(max_length=max_length, **self._what)

    def load(self, max_length: int) -> Runtime:
        from pliant.kernels import compiled_classifier

        return compiled_classifier.load(max_length=max_length, **self._what)


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
