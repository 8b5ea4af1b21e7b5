"""What a decoder computes with: the protocol that every device's kernels follow, and its readable form in plain torch.

`TorchKernels` runs on any device, is what faster kernels are tested against, and what a machine without a compiler
gets. All kernels take norms, softmax and rotations in float32, whatever the dtype; transformers rounds rotations to it.

Buffers: a result of any method, or of a `Linear`, may be a buffer that the kernels own. It stays valid until the same
method, or the same `Linear`, is called again; only `prefill_attention` gives its result away. Nobody but the kernels
writes to it, except that `add_norm` updates the `hidden` it is given, and `AddLora` what a `Linear` gave.

Positions, slots and lengths are int32 tensors on the decoder's device. `keys` and `values` are one layer's, views
[slots, kv_heads, max_length, head_dim] of the same strides: slots lie apart, and what a slot holds of the layer's keys,
or of its values, is contiguous (see `kv_slots`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.ragged import Ragged, Span
from pliant.kernels.upload import upload

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines by position, float32 [max_length, head_dim]; the second half of a row repeats the first."""
Norms = tuple[Tensor, Tensor]
"""The weights of the norms on every query and key head, [head_dim] each (Qwen3)."""


class Linear(Protocol):
    """A linear layer whose weight has been prepared for the device."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""


class AddLora(Protocol):
    """What the adapters of one `LoraBatch` do to a linear layer's result."""

    def __call__(self, y: Tensor, x: Tensor, layer: int, site: str) -> None:
        """Add B A x of each row's adapter to `y` [n, out], which fused linear layer `site` made of `x` [n, in].

        `site` is one of `lora_layout.SITES`. Rows that are in no group of the batch stay as they are.
        """


class DecoderKernels(Protocol):
    """The operations of one decoder layer, and of a batch of slots whose texts differ in length."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer x -> x @ weight.T + bias, with weight [out, in]. May pack the weight; the caller drops its own."""

    def lora(self, batch: LoraBatch) -> AddLora:
        """What adds the adapters of `batch`, during the launch that the batch was made for (Chameleon §4.1)."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta`, if any, to `hidden` [n, h] in place, and return RMSNorm(hidden) * weight, [n, h]."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """[n, 2i] -> silu(first half) * second half, [n, i]."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotation: Rotation,
        norms: Norms | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Split qkv [n, (heads + 2 kv_heads) head_dim], normalise q and k if `norms`, and rotate them.

        Row i's key and value are stored at keys[slots[i], :, positions[i]] and values likewise; no two rows share a
        place. Returns the queries, [n, heads, head_dim].
        """

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        """Every token of `batch` attends to its row's text up to itself, or to the last `window` tokens of that.

        Here keys and values lie in pages, [pages, kv_heads, page, head_dim]; what the tokens themselves hold is stored
        already. q is [tokens, heads, head_dim]. Returns [tokens, heads * head_dim].
        """

    def decode_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, offset: int, lengths: Tensor, window: int | None
    ) -> Tensor:
        """One token of each slot offset, offset + 1, … attends to its slot's text (Flover §V-D).

        q is [n, heads, head_dim], and row i attends to the first lengths[i] tokens of slot offset + i, the one just
        stored included (so lengths[i] >= 1), or to the last `window` of them. Returns [n, heads * head_dim].
        """

    def prefill_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, slot: int, start: int, window: int | None
    ) -> Tensor:
        """Tokens start, …, start + t - 1 of one slot, whose keys and values are stored already, attend causally.

        q is [t, heads, head_dim]. Returns [t, heads * head_dim], which belongs to the caller.
        """

    def move(self, keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of slots in every layer: (source, target, tokens).

        Here keys and values are those of all layers, [layers, slots, kv_heads, max_length, head_dim]. No slot is both
        a source and a target, nor the target of two moves.
        """


class TorchKernels:
    """`DecoderKernels` in plain torch, on any device."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return lambda x: functional.linear(x, weight, bias)

    def lora(self, batch: LoraBatch) -> AddLora:
        arena = batch.arena
        rows = [upload(group.rows, arena.device) for group in batch.groups]

        def add(y: Tensor, x: Tensor, layer: int, site: str) -> None:
            for group, at in zip(batch.groups, rows, strict=True):
                start, found = group.offset + layer * group.layout.block, group.layout.sites[site]
                if not found.rank:
                    continue
                a = arena[start + found.a :][: found.rank * found.inputs].view(found.rank, found.inputs)
                inner = (x[at] @ a.T).split_with_sizes([module.rank for module in found.modules], dim=1)
                for module, part in zip(found.modules, inner, strict=True):
                    b = arena[start + module.b :][: module.rank * module.out].view(module.rank, module.out)
                    y[:, module.first : module.first + module.out].index_add_(0, at, part @ b)

        return add

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            hidden += delta
        return _norm(hidden, weight, eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        rotation: Rotation,
        norms: Norms | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q, k, v = qkv.view(len(qkv), -1, head_dim).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        if norms:
            q, k = _norm(q, norms[0], eps), _norm(k, norms[1], eps)
        cos, sin = (table[positions].unsqueeze(1) for table in rotation)
        places = positions % keys.shape[2]
        keys[slots, :, places] = _rotate(k, cos, sin)
        values[slots, :, places] = v
        return _rotate(q, cos, sin)

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        singles, n = batch.singles, [batch.singles, *(span.tokens for span in batch.spans)]
        first, *rest = q.split_with_sizes(n)
        parts = [self._attend_singles(first, keys, values, batch, window)] if singles else []
        for table, span, chunk in zip(batch.tables[singles:], batch.spans, rest, strict=True):
            parts.append(self._attend_span(chunk, keys, values, table, span, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_singles(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        """The rows of one token."""
        n, heads, head_dim = q.shape
        last = batch.positions[:n, None]
        pages = -(-(int(last.max()) + 1) // keys.shape[2])
        k, v = (texts(buffer, batch.tables[:n, :pages]).float() for buffer in (keys, values))
        positions = torch.arange(k.shape[2], device=q.device)
        hidden = positions > last
        if window is not None:
            hidden |= positions <= last - window
        grouped = q.view(n, keys.shape[1], -1, head_dim).float() * head_dim**-0.5
        scores = (grouped @ k.transpose(2, 3)).masked_fill(hidden[:, None, None], -torch.inf)
        mixed: Tensor = scores.softmax(-1) @ v.masked_fill(hidden[:, None, :, None], 0)  # 0 times what others left
        return mixed.to(q.dtype).view(n, heads * head_dim)

    def _attend_span(
        self, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, span: Span, window: int | None
    ) -> Tensor:
        """The tokens of one chunk."""
        tokens, heads, head_dim = q.shape
        stop = span.start + tokens
        pages = -(-stop // keys.shape[2])
        k, v = (texts(buffer, table[None, :pages])[:, :, :stop] for buffer in (keys, values))
        whole = not span.start and (window is None or stop <= window)
        mask = None if whole else _causal(span.start, stop, window, q.device)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k, v, mask, is_causal=whole, enable_gqa=heads != keys.shape[1]
        )
        return out[0].transpose(0, 1).reshape(tokens, heads * head_dim)

    def decode_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, offset: int, lengths: Tensor, window: int | None
    ) -> Tensor:
        n, heads, head_dim = q.shape
        longest = int(lengths.max())
        k, v = (buffer[offset : offset + n, :, :longest].float() for buffer in (keys, values))
        positions = torch.arange(longest, device=q.device)
        hidden = positions >= lengths[:, None]
        if window is not None:
            hidden |= positions < lengths[:, None] - window
        grouped = q.view(n, keys.shape[1], -1, head_dim).float() * head_dim**-0.5
        scores = (grouped @ k.transpose(2, 3)).masked_fill(hidden[:, None, None], -torch.inf)
        mixed: Tensor = scores.softmax(-1) @ v.masked_fill(hidden[:, None, :, None], 0)  # 0 times what others left
        return mixed.to(q.dtype).view(n, heads * head_dim)

    def prefill_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, slot: int, start: int, window: int | None
    ) -> Tensor:
        tokens, heads, head_dim = q.shape
        stop = start + tokens
        k, v = (buffer[slot, :, :stop].unsqueeze(0) for buffer in (keys, values))
        whole = not start and (window is None or stop <= window)
        mask = None if whole else _causal(start, stop, window, q.device)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k, v, mask, is_causal=whole, enable_gqa=heads != keys.shape[1]
        )
        return out[0].transpose(0, 1).reshape(tokens, heads * head_dim)

    def move(self, keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        for source, target, tokens in moves:
            for buffer in (keys, values):
                buffer[:, target, :, :tokens] = buffer[:, source, :, :tokens]


def texts(pages: Tensor, tables: Tensor) -> Tensor:
    """The keys or values that lie in `pages`, text by text, [rows, kv_heads, tokens, head_dim]."""
    _, kv_heads, page, head_dim = pages.shape
    rows, count = tables.shape
    return pages[tables].transpose(1, 2).reshape(rows, kv_heads, count * page, head_dim)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def _causal(start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the tokens 0 to `stop` each token from `start` on attends to, [stop - start, stop]."""
    key = torch.arange(stop, device=device)
    query = key[start:, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
