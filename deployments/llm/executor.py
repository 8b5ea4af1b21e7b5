"""What an engine needs of an executor, as `pliant.kernels.decoder.executor` describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.kernels.decoder.decode_step import Launched, Step
from pliant.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor


class Slots(Protocol):
    """Where requests are computed, and where their pages are."""

    slots: int
    max_length: int
    page: int
    page_bytes: int
    arena_bytes: int

    def admit(
        self,
        slot: int,
        sampling: Sampling,
        adapter: str | None,
        prompt: NDArray[np.int32],
        answer: NDArray[np.int32],
    ) -> None: ...

    def move(self, moves: Sequence[tuple[int, int]]) -> None: ...

    def move_pages(self, moves: Sequence[tuple[int, int]]) -> None: ...

    def keep_pages(self, count: int) -> None: ...


class AdapterMemory(Protocol):
    """Where adapters are, beside the pages."""

    slots: int
    max_length: int
    page: int
    page_bytes: int
    arena_bytes: int
    weight_bytes: int

    def install(self, key: str, ranks: tuple[int, ...], blob: Tensor) -> None: ...

    def remove(self, key: str) -> None: ...


class Executor(Slots, AdapterMemory, Protocol):
    pipelined: bool
    vocabulary: int

    def launch(self, step: Step) -> Launched: ...
