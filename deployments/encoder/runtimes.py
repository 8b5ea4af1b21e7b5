"""Runtimes for an encoder's engine: which lengths a replica may hold, and where it gets them from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from types import ModuleType
from typing import Any

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.lengths import Lengths, measured_kind
from pliant.errors import CannotCompileError, ModelError
from pliant.formats.profile import Profile, RuntimeKind
from pliant.models import sources

logger = logging.getLogger("pliant")

_MB = 2**20


class ModelRuntimes:
    """Runtimes of one service's model, each made once per machine; until then the uncompiled model.

    Until the device is profiled, where that decides, they are packed, if the model can be, at first without times. A
    model that cannot tell which words are important, and should, answers without.
    """

    def __init__(self, config: EncoderConfig) -> None:
        self.profile: Profile | None = None
        """From which it follows what there is, once it is measured."""
        self.reason = ""
        """Why it is that; empty until it is measured."""
        self._config = config
        self._folder = sources.fetch(config.model)
        self.device = device(config)
        self._longest = config.lengths[-1] if config.lengths else sources.describe(self._folder).max_length
        self._importance = config.importance
        self._held: set[int] = set()
        self._settle(None)
        self.memory = _Memory(config) if config.residency == "several" else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to be at home at, to start with, in rising order."""
        if not (self._config.lengths or self.profile or self.resident):
            return (self._longest,)
        lengths = Lengths(self._config.lengths, self.profile, resident=self.resident, longest=self._longest)
        return lengths.current

    @property
    def resident(self) -> bool:
        """Whether one runtime takes all lengths."""
        return self._kind == "packed" or (self._kind == "dynamic" and self._config.residency != "one")

    def missing(self) -> set[int]:
        """Of `lengths`, and of what was loaded, those that are not compiled yet; the longest where one takes all."""
        if self._kind == "packed":
            return set() if _timed().is_prepared(**self._packed) else {self._longest}
        kernel = _kernel(self._importance)
        wanted = {self._longest} if self._kind == "dynamic" else {*self.lengths, *self._held}
        return {length for length in wanted if not kernel.is_prepared(max_length=length, **self._what)}

    def settle_lengths(self) -> None:
        """Profile the device if what there is follows from that, unless a process on this machine has done so."""
        if measured_kind(self._config, None) is None:
            self._settle(profile(self._config))

    def compile(self, max_length: int, urgency: Callable[[], float]) -> None:
        """Make `load(max_length)` give a compiled runtime, at low priority. Raises CannotCompileError, ModelError."""
        if self._kind == "packed":
            _timed().prepare(**self._packed)
        else:
            _kernel(self._importance).prepare(max_length=max_length, urgency=urgency, **self._what)

    def load(self, max_length: int) -> Runtime:
        """The packed runtime, the compiled one if it is there, or else the uncompiled model. Raises ModelError."""
        if self._config.device == "cuda":
            from pliant.kernels import gpu_memory

            gpu_memory.take_share(self._config.gpus)
        if self._kind == "packed":
            try:
                packed: Runtime = _timed().load(measuring=False, unasked=self._config.exits, **self._packed)
                return packed
            except CannotCompileError as reason:  # the compiler has gone, or cannot compile it
                logger.warning(str(reason))
        if self._kind != "static":
            max_length = self._longest
        self._held.add(max_length)
        try:
            return self._load(max_length, self._importance)
        except ModelError as error:
            if not self._importance:
                raise
            unavailable = error
        plain = self._load(max_length, importance=False)
        self._importance = False
        logger.warning(
            "%s answers, but cascades that begin with it leave out no words; say prune: false there: %s",
            self._config.model,
            unavailable,
        )
        return plain

    def _settle(self, found: Profile | None) -> None:
        self.profile = found
        self._held.clear()
        self._kind, self.reason = measured_kind(self._config, found) or (self._presumed(), "")
        if found:
            logger.info("%s: its runtime is %s", self._config.model, self.reason)

    def _presumed(self) -> RuntimeKind:
        """What there is until it is measured."""
        if self._config.by_length:
            return "dynamic"
        from pliant.kernels.encoder import packed_runtime

        config = self._config
        return "packed" if packed_runtime.suits(self._folder, device=config.device, dtype=config.dtype) else "dynamic"

    @property
    def _model(self) -> dict[str, Any]:
        config = self._config
        return {
            "folder": self._folder,
            "device": config.device,
            "dtype": config.dtype,
            "threads": config.threads,
        }

    @property
    def _packed(self) -> dict[str, Any]:
        return {**self._model, "max_length": self._longest, "exits": self._config.with_exits}

    @property
    def _what(self) -> dict[str, Any]:
        return {**self._model, "dynamic": self._kind != "static"}

    def _load(self, max_length: int, importance: bool) -> Runtime:
        runtime: Runtime = _kernel(importance).load(max_length=max_length, compiling=False, **self._what)
        return runtime


def _kernel(importance: bool) -> ModuleType:
    """Imports torch, which the C code does without."""
    from pliant.kernels.encoder import compiled_classifier, importance_classifier

    return importance_classifier if importance else compiled_classifier


def _timed() -> ModuleType:
    from pliant.kernels.encoder import timed_runtime

    return timed_runtime


class _Memory:
    """What static runtimes of a replica share; see `EncoderConfig.memory_mb`."""

    def __init__(self, config: EncoderConfig) -> None:
        self._device = config.device
        self.room_mb = float(config.memory_mb or _free_mb(config))

    def used_mb(self) -> float:
        from pliant.kernels import memory

        return memory.used_bytes(self._device) / _MB


def _free_mb(config: EncoderConfig) -> float:
    if config.device == "cpu":
        from pliant.kernels import memory

        return memory.free_bytes() / 2 / config.replicas.max / _MB
    import torch

    from pliant.kernels import gpu_memory

    gpu_memory.take_share(config.gpus)
    return 0.9 * gpu_memory.free_bytes(torch.device("cuda")) / _MB


def device(config: EncoderConfig) -> str:
    """What a replica of the service computes on here: the processor, and the version of torch."""
    from pliant.kernels.runtime_cache import device_name

    return f"{device_name(config.device)}, torch {version('torch')}"


def compile_ahead(config: EncoderConfig) -> None:
    """Have what is compiled here whatever the model, while that is fetched or trained."""
    from pliant.kernels.c_compiler import CompilerError
    from pliant.kernels.encoder import cpu_encoder

    if config.device == "cpu":
        with suppress(CompilerError):  # whoever loads a model says what it means
            cpu_encoder.compile_ahead()


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
        static=config.by_length,
        progress=progress,
    )
