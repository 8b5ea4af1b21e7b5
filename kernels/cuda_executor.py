"""Runs a decoder's iterations on a GPU while the CPU prepares the next one (Flover §V).

A decode step launches hundreds of small kernels, which takes a CPU longer than the GPU needs for them. So the step is
recorded once as a CUDA graph for each of a few numbers of rows, and a window runs in the smallest that holds it; rows
beyond it belong to no slot. Sampling follows outside the graph, as it differs from batch to batch. Nothing waits for
the GPU before a result is asked for, so that the engine can launch step t + 1 and only then read step t.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.cuda_kernels import CudaKernels
from pliant.kernels.decoder import Decoder, Prefill
from pliant.kernels.executor import Done, Executor, Launched, Output, Step
from pliant.kernels.sampling import Ranked, Sampled, Sampler
from pliant.kernels.upload import upload

Forward = Callable[[Tensor, Tensor], Tensor]
"""(slots, lengths), [rows] int32 each -> logits [rows, vocab]."""
_NO_SLOT = -1
_APART = 8
_ALIGNED = 4  # int32s in 16 bytes: the kernels are compiled for addresses that are multiples of that


class CudaExecutor(Executor):
    """An `Executor` whose decoder computes with `CudaKernels`, on the GPU's default stream; no launch waits for it.

    Making one compiles all kernels and records all graphs, which takes seconds and stores into slot 0; nothing else in
    this process may use the GPU meanwhile.
    """

    pipelined = True

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, sampler: Sampler) -> None:
        super().__init__(decoder, sampler)
        assert isinstance(decoder.kernels, CudaKernels)
        self._kernels = decoder.kernels
        self._compile()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        logits = torch.empty(self.slots, self.shape.vocab, dtype=decoder.kv.keys.dtype, device=decoder.device)
        self._recorded = [
            RecordedStep(self._forward, logits[:rows], pool, stream) for rows in reversed(graph_rows(self.slots))
        ]
        """Largest first, so that the others find room in its memory."""

    def _compile(self) -> None:
        """Run what no graph holds once, so that no request waits for a compiler."""
        self._decoder.prefill([Prefill(0, 0, np.zeros(1, np.int32), True)])
        self._decoder.kv.move([(0, 0, 1)])

    def _logits(self, step: Step) -> Tensor:
        recorded = next(one for one in reversed(self._recorded) if one.rows >= len(step.lengths))
        return recorded.run(step.offset, step.lengths)

    def _launched(self, first: Sampled | None, window: Sampled | None) -> Launched:
        return _UnderWay(first, window)

    def _forward(self, slots: Tensor, lengths: Tensor) -> Tensor:
        """As `Decoder.decode`, for slots that are known on the GPU alone."""
        stored = lengths + 1

        def attend(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
            return self._kernels.attend(q, keys, values, slots, stored, window)

        return self._decoder.step(self._last[slots.clamp(min=0)], lengths, slots, attend)


class RecordedStep:
    """A decode step of as many rows as `logits` [rows, vocab] has, which each run fills, as a CUDA graph.

    `forward` must launch the same work for all values of its arguments, compute nothing for slots below 0, and never
    wait for the GPU. Graphs that are recorded on the same `stream` and share a `pool` share its memory.
    """

    def __init__(self, forward: Forward, logits: Tensor, pool: Any, stream: torch.cuda.Stream) -> None:
        self.rows = len(logits)
        self._logits = logits
        self._inputs = upload(_table(self.rows, 0, np.empty(0, np.int32)), logits.device)
        slots, lengths = self._inputs[:, : self.rows]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(slots, lengths)  # compiles kernels, which cannot be done while recording
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            logits.copy_(forward(slots, lengths))

    def run(self, offset: int, lengths: NDArray[np.int32]) -> Tensor:
        """The logits of the window that begins at `offset`, [len(lengths), vocab]; a view of what it was made with."""
        table = torch.from_numpy(_table(self.rows, offset, lengths))
        self._inputs.copy_(table.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._logits[: len(lengths)]


class _UnderWay(Done):
    """A step whose tokens are on their way to the CPU."""

    def __init__(self, first: Sampled | None, window: Sampled | None) -> None:
        super().__init__(_to_host(first), _to_host(window))
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._copied.record()

    def result(self) -> Output:
        self._copied.synchronize()
        return super().result()


def graph_rows(slots: int) -> list[int]:
    """For how many rows steps are recorded: 1, 2, 4, multiples of 8, and `slots`, rising."""
    return [rows for rows in (1, 2, 4, *range(_APART, slots, _APART)) if rows < slots] + [slots]


def _table(rows: int, offset: int, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Slots and lengths of a window, padded with rows of no slot; [2, rows or more, for the sake of alignment]."""
    table = np.zeros((2, rows + -rows % _ALIGNED), np.int32)
    table[0] = _NO_SLOT
    table[0, : len(lengths)] = np.arange(offset, offset + len(lengths))
    table[1, : len(lengths)] = lengths
    return table


def _to_host(sampled: Sampled | None) -> Sampled | None:
    """Copies in pinned memory, there when all that was launched before is done."""
    if sampled is None:
        return None
    tokens = sampled.tokens.to("cpu", non_blocking=True)
    ranked = sampled.ranked
    return Sampled(tokens, ranked and Ranked(*(tensor.to("cpu", non_blocking=True) for tensor in ranked)))
