"""The decoder's kernels on an NVIDIA GPU: Triton for what reads pages, torch's libraries for matrix products."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pliant.kernels.decoder import triton_attention, triton_decode, triton_lora
from pliant.kernels.decoder.kernels import AddLora, Norms, Rotation, TorchKernels
from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.ragged import Ragged
from pliant.kernels.upload import upload

_PROGRAMS = 4  # attention programs that a processor of the GPU has in flight
_LONGEST_SHARE = 2048  # tokens that one program attends to, so that a long text does not outlast the others
_MOST_SPLITS = 64


class CudaKernels(TorchKernels):
    """`DecoderKernels` on a GPU of `processors` multiprocessors, by default those of the current one.

    No method waits for the GPU. All but `move`, and `attention` of chunks, can be recorded in a CUDA graph.
    """

    def __init__(self, processors: int | None = None) -> None:
        if processors is None:
            processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._programs = _PROGRAMS * processors

    def lora(self, batch: LoraBatch) -> AddLora:
        """As in `DecoderKernels`; a recorded graph adds `LoraTiles` of its own instead."""
        return triton_lora.tiles_of(batch).add

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return triton_decode.add_norm(hidden, delta, weight, eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        return triton_decode.gate(gate_up)

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        pages: Tensor,
        rotation: Rotation,
        norms: Norms | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        return triton_decode.rotate_and_store(qkv, positions, pages, rotation, norms, eps, keys, values)

    def _attend_singles(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        longest = batch.tables.shape[1] * keys.shape[2]
        splits = shares(self._programs, len(q) * keys.shape[1], longest if window is None else min(window, longest))
        return triton_attention.attend(q, keys, values, batch.tables, batch.positions, window, splits)

    def _attend_span(self, q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
        """With keys repeated for all heads that share them.

        On GPUs torch's grouped attention takes neither masks nor float32, but for a kernel that stores all scores.
        """
        group = q.shape[1] // k.shape[1]
        k, v = (text.repeat_interleave(group, dim=1) for text in (k, v))
        return super()._attend_span(q, k, v, start, window)

    def move(self, keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        places = upload(np.array(moves, np.int64), keys.device)
        triton_decode.move(keys, values, places, moves)


def shares(programs: int, texts: int, longest: int) -> int:
    """Into how many parts, a power of two, to split each of `texts` texts of up to `longest` tokens.

    Enough for `programs` parts in all, and for none above 2,048 tokens; 64 at most.
    """
    wanted = max(-(-programs // texts), -(-longest // _LONGEST_SHARE))
    return min(_MOST_SPLITS, 1 << (wanted - 1).bit_length())
