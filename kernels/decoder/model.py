"""A Llama-family decoder over slots: prompts in chunks, and one token at a time for all slots of a window together.

One fused pass per iteration serves every live request, however their lengths differ (Flover §V): linear layers see one
batch of tokens, and only attention looks at slots one by one. Rows that use a LoRA adapter get what it adds after each
linear layer (Chameleon §4.1). The code below is the whole model; what its operations do on a device is the kernels'
business (see `kernels`).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pliant.kernels.decoder.decode_step import Prefill
from pliant.kernels.decoder.kernels import AddLora, DecoderKernels, Linear, Norms
from pliant.kernels.decoder.kv_slots import KVSlots
from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.rope import rotation
from pliant.kernels.decoder.weights import DecoderWeights, LayerWeights
from pliant.kernels.upload import upload

Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""(queries, one layer's keys, values, sliding window) -> [n, heads * head_dim]."""


class _Layer:
    def __init__(self, weights: LayerWeights, kernels: DecoderKernels) -> None:
        self.input_norm: Tensor = weights.input_norm
        self.qkv: Linear = kernels.linear(weights.qkv, weights.qkv_bias)
        self.qk_norms: Norms | None = weights.qk_norms
        self.output: Linear = kernels.linear(weights.output, weights.output_bias)
        self.mlp_norm: Tensor = weights.mlp_norm
        self.gate_up: Linear = kernels.linear(weights.gate_up, weights.gate_up_bias)
        self.down: Linear = kernels.linear(weights.down, weights.down_bias)


class Decoder:
    """A decoder with its keys and values in `kv`, whose kernels it shares. Logits are in the weights' dtype.

    The logits returned may be a buffer that the next call reuses.
    """

    def __init__(self, weights: DecoderWeights, kernels: DecoderKernels, kv: KVSlots) -> None:
        self.shape = weights.shape
        self.device = weights.device
        self.kv = kv
        self.kernels = kernels
        self._embedding = weights.embedding()
        self._layers = [_Layer(weights.layer(index), kernels) for index in range(self.shape.layers)]
        self._norm = weights.norm()
        self._head = kernels.linear(self._embedding if self.shape.tied else weights.head(), None)
        self._rotation = rotation(self.shape.rope, self.shape.head_dim, kv.max_length, self.device)

    def prefill(self, chunks: Sequence[Prefill], lora: LoraBatch | None = None) -> Tensor:
        """Store the chunks' keys and values; the logits after each `last` one, [number of those, vocab], in order.

        The rows of `lora` are those of all chunks' tokens one after the other.
        Raises ValueError for a chunk that is empty, does not fit into its slot, or has an id outside the vocabulary.
        """
        for chunk in chunks:
            self._check(chunk)
        sizes = [len(chunk.ids) for chunk in chunks]
        positions = np.concatenate([np.arange(c.start, c.start + len(c.ids), dtype=np.int32) for c in chunks])
        slots = np.repeat(np.array([chunk.slot for chunk in chunks], np.int32), sizes)
        ids = np.concatenate([chunk.ids for chunk in chunks], dtype=np.int32)

        def attend(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
            rows = zip(chunks, q.split_with_sizes(sizes), strict=True)
            prefill_attention = self.kernels.prefill_attention
            parts = [prefill_attention(part, keys, values, c.slot, c.start, window) for c, part in rows]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        tokens, at, where = (upload(array, self.device) for array in (ids, positions, slots))
        hidden, delta = self._layers_of(tokens, at, where, attend, self._adder(lora))
        ends = [end - 1 for end, chunk in zip(np.cumsum(sizes), chunks, strict=True) if chunk.last]
        if not ends:
            return hidden.new_empty((0, self.shape.vocab))
        rows = upload(np.array(ends), self.device)
        return self._logits(hidden[rows], delta[rows])

    def decode(self, tokens: Tensor, offset: int, lengths: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """One step for each slot offset, offset + 1, …: the logits that follow its token, [n, vocab].

        `tokens` [n] are the last of each slot's text and not stored yet, and `lengths` [n] int32 count the tokens that
        are; they must be less than max_length, which is not checked here, as they may lie on a GPU. The i-th row of
        `lora` is slot offset + i.
        """
        slots = torch.arange(offset, offset + len(tokens), dtype=torch.int32, device=self.device)
        stored = lengths + 1

        def attend(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
            return self.kernels.decode_attention(q, keys, values, offset, stored, window)

        return self.step(tokens, lengths, slots, attend, self._adder(lora))

    def step(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend, add_lora: AddLora | None = None
    ) -> Tensor:
        """The logits that follow each of `tokens` [n], which go to `positions` of `slots`, [n] int32; [n, vocab]."""
        return self._logits(*self._layers_of(tokens, positions, slots, attend, add_lora))

    def _layers_of(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend, add_lora: AddLora | None
    ) -> tuple[Tensor, Tensor]:
        """All layers for a batch of tokens, [n] each: the residual stream and what is still to be added to it."""
        kernels, eps = self.kernels, self.shape.norm_eps
        hidden = self._embedding[tokens]
        delta: Tensor | None = None
        for index, (layer, window) in enumerate(zip(self._layers, self.shape.windows, strict=True)):
            keys, values = self.kv.layer(index)
            normed = kernels.add_norm(hidden, delta, layer.input_norm, eps)
            qkv = layer.qkv(normed)
            if add_lora is not None:
                add_lora(qkv, normed, index, "qkv")
            q = kernels.rotate_and_store(qkv, positions, slots, self._rotation, layer.qk_norms, eps, keys, values)
            mixed = attend(q, keys, values, window)
            delta = layer.output(mixed)
            if add_lora is not None:
                add_lora(delta, mixed, index, "output")
            normed = kernels.add_norm(hidden, delta, layer.mlp_norm, eps)
            gate_up = layer.gate_up(normed)
            if add_lora is not None:
                add_lora(gate_up, normed, index, "gate_up")
            gated = kernels.gate(gate_up)
            delta = layer.down(gated)
            if add_lora is not None:
                add_lora(delta, gated, index, "down")
        assert delta is not None
        return hidden, delta

    def _adder(self, lora: LoraBatch | None) -> AddLora | None:
        return None if lora is None else self.kernels.lora(lora)

    def _logits(self, hidden: Tensor, delta: Tensor) -> Tensor:
        return self._head(self.kernels.add_norm(hidden, delta, self._norm, self.shape.norm_eps))

    def _check(self, chunk: Prefill) -> None:
        stop = chunk.start + len(chunk.ids)
        if not 0 <= chunk.slot < self.kv.slots or not 0 <= chunk.start < stop <= self.kv.max_length:
            raise ValueError(
                f"a chunk of tokens {chunk.start} to {stop} for slot {chunk.slot} does not fit: there are "
                f"{self.kv.slots} slots of {self.kv.max_length} tokens, and a chunk has at least one"
            )
        low, high = int(chunk.ids.min()), int(chunk.ids.max())
        if low < 0 or high >= self.shape.vocab:
            raise ValueError(f"token ids must lie in 0 to {self.shape.vocab - 1}, got {low} to {high}")
