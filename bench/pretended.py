"""An executor of language models that computes nothing and only lets time pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pliant.kernels.decoder.decode_step import Output, Step
from pliant.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor


class PretendedExecutor:
    """A step takes `step_s`, `row_s` more for each row and `prompt_s` for each token of a prompt, which `spend` lets
    pass. It reads any token, and all that it samples are `token`."""

    page_bytes, pipelined, vocabulary, weight_bytes = 1, False, 2**31, 1

    def __init__(
        self,
        slots: int,
        max_length: int,
        spend: Callable[[float], None],
        step_s: float,
        row_s: float = 0.0,
        prompt_s: float = 0.0,
        token: int = 0,
    ) -> None:
        self.slots = self.arena_bytes = slots
        self.max_length = self.page = max_length
        self._spend = spend
        self._times = step_s, row_s, prompt_s
        self._token = token

    def admit(
        self, slot: int, sampling: Sampling, adapter: str | None, prompt: NDArray[np.int32], answer: NDArray[np.int32]
    ) -> None: ...

    def move(self, moves: Sequence[tuple[int, int]]) -> None: ...

    def move_pages(self, moves: Sequence[tuple[int, int]]) -> None: ...

    def keep_pages(self, count: int) -> None: ...

    def install(self, key: str, ranks: tuple[int, ...], blob: Tensor) -> None: ...

    def remove(self, key: str) -> None: ...

    def launch(self, step: Step) -> _Done:
        step_s, row_s, prompt_s = self._times
        prompts = sum(len(prefill.ids) for prefill in step.prefills)
        self._spend(step_s + row_s * len(step.lengths) + prompt_s * prompts)
        ended = sum(prefill.last for prefill in step.prefills)
        return _Done(Output(self._tokens(ended), self._tokens(len(step.lengths)), None, None))

    def _tokens(self, count: int) -> NDArray[np.int64]:
        return np.full(count, self._token, np.int64)


class _Done:
    def __init__(self, output: Output) -> None:
        self._output = output

    def result(self) -> Output:
        return self._output
