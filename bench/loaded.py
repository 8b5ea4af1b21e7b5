"""Runtimes for replicas of ours around other models."""

from __future__ import annotations

from collections.abc import Callable

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.computing import Runtime


class Loaded:
    """What `load(max_length)` gives, for the configured lengths; it needs no preparation and no profile."""

    profile = None
    device = ""
    resident = False
    memory = None
    reason = "a baseline"

    def __init__(self, config: EncoderConfig, load: Callable[[int], Runtime]) -> None:
        assert config.lengths
        self.lengths = config.lengths
        self.load = load

    def prepare(self, max_length: int) -> None:
        pass
