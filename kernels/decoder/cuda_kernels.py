"""The decoder's kernels on an NVIDIA GPU: Triton, and torch's libraries for products of many rows."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.decoder import attention_work, fp8, int8, triton_attention, triton_decode, triton_lora
from pliant.kernels.decoder.attention_work import Work
from pliant.kernels.decoder.kernels import AddLora, Linear, Norms, Rotation, TorchKernels
from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.ragged import Ragged
from pliant.kernels.decoder.triton_attention import WorkTensors
from pliant.kernels.decoder.triton_linear import TritonLinear
from pliant.kernels.upload import packed, unpacked, upload

_PROGRAMS = 4  # programs of attention that a processor of the GPU has in flight
Numbers = NDArray[np.int32]


class CudaKernels(TorchKernels):
    """`DecoderKernels` on a GPU of `processors` multiprocessors, by default those of the current one.

    No method waits for the GPU. All but `move` can be recorded in a CUDA graph, `attention` of rows of one token whose
    `Ragged.work` is there.
    """

    def __init__(self, processors: int | None = None) -> None:
        if processors is None:
            processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._processors = processors

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return TritonLinear(weight, None, bias, self._processors)

    def int8_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        values, scale = int8.quantized(weight)
        return TritonLinear(values, scale, bias, self._processors)

    def fp8_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        values, scale = fp8.quantized(weight)
        return TritonLinear(values, scale, bias, self._processors)

    def gated(self, linear: Linear) -> Linear:
        assert isinstance(linear, TritonLinear)
        return linear.gated

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

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        tokens, heads, head_dim = q.shape
        if window not in batch.work:
            batch.work[window] = self._uploaded(q, keys, batch, window)
        out = q.new_empty(tokens, heads * head_dim)
        for work, chunked in zip(batch.work[window], (False, True), strict=False):
            if work is not None:
                triton_attention.attend(q, keys, values, batch.tables, work, window, out, chunked)
        return out

    def work(self, lengths: Numbers, window: int | None, keys: Tensor) -> Work:
        """What `attention` of rows of one token is shared out to, for `keys` of one layer."""
        _, kv_heads, _, head_dim = keys.shape
        tile = triton_attention.tile(head_dim, keys.element_size())
        return attention_work.of_singles(lengths, window, max(1, _PROGRAMS * self._processors // kv_heads), tile)

    def _uploaded(
        self, q: Tensor, keys: Tensor, batch: Ragged, window: int | None
    ) -> tuple[WorkTensors | None, WorkTensors | None]:
        singles = spans = None
        if batch.singles:
            assert batch.lengths is not None
            singles = _upload(self.work(batch.lengths, window, keys), q.device)
        if batch.spans:
            most = triton_attention.chunk_tokens(q.shape[1] // keys.shape[1])
            spans = _upload(attention_work.of_spans(batch.singles, batch.spans, window, most), q.device)
        return singles, spans

    def move(self, keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        places = upload(np.array(moves, np.int64), keys.device)
        triton_decode.move(keys, values, places, moves)


def _upload(work: Work, device: torch.device) -> WorkTensors:
    return WorkTensors(*unpacked(upload(packed(work), device), work))
