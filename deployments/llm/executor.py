"""What an engine needs of an executor, as `pliant.kernels.executor` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pliant.kernels.executor import Launched, Step
from pliant.sampling import Sampling


class Slots(Protocol):
    """Where requests are computed."""

    slots: int
    max_length: int

    def admit(self, slot: int, sampling: Sampling, adapter: str | None = None) -> None: ...

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None: ...

    def keep_slots(self, limit: int) -> None: ...


class AdapterMemory(Protocol):
    """Where adapters are, beside the slots."""

    slots: int
    slot_bytes: int
    arena_bytes: int

    def install(self, key: str, ranks: tuple[int, ...], blob: Tensor) -> None: ...

    def remove(self, key: str) -> None: ...


class Executor(Slots, AdapterMemory, Protocol):
    pipelined: bool

    def launch(self, step: Step) -> Launched: ...
