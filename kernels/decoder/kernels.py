"""What a decoder computes with: the protocol that every device's kernels follow, and its readable form in plain torch.

`TorchKernels` runs on any device, is what faster kernels are tested against, and what a machine without a compiler
gets. All kernels take norms, softmax and rotations in float32, whatever the dtype; transformers rounds rotations to it.

Buffers: a result of any method, or of a `Linear`, may be a buffer that the kernels own. It stays valid until the same
method, or the same `Linear`, is called again. Nobody but the kernels writes to it, except that `add_norm` updates the
`hidden` it is given, and `AddLora` and ranks that add up what a `Linear` gave.

Positions and pages are int32 tensors on the decoder's device. `keys` and `values` are one layer's, views [pages,
kv_heads, page, head_dim] of the same strides, where `page` is a power of two: pages lie apart, and what a page holds of
the layer's keys, or of its values, is contiguous (see `kv_pages`). They are in the dtype of all else, or in that of
`fp8`, but for `CpuKernels`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pliant.kernels.decoder import fp8, int8
from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.ragged import Ragged
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
    """The operations of one decoder layer on a batch of rows whose texts differ in length."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer x -> x @ weight.T + bias, with weight [out, in]. May pack the weight; the caller drops its own."""

    def int8_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """As `linear`, with the weight as `int8.quantized` has it, and on CPUs every row of x, too."""

    def fp8_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """As `linear`, with the weight as `fp8.quantized` has it."""

    def lora(self, batch: LoraBatch) -> AddLora:
        """What adds the adapters of `batch`, during the launch that the batch was made for (Chameleon §4.1)."""

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta`, if any, to `hidden` [n, h] in place, and return RMSNorm(hidden) * weight, [n, h]."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """[n, 2i] -> silu(first half) * second half, [n, i]."""

    def gated(self, linear: Linear) -> Linear:
        """The layer x -> gate(linear(x)), in one launch where that is faster; these kernels made `linear`."""

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
        """Split qkv [n, (heads + 2 kv_heads) head_dim], normalise q and k if `norms`, and rotate them.

        Row i's key is stored at keys[pages[i], :, positions[i] % page], and its value likewise; no two rows share a
        place but in page 0. Returns the queries, [n, heads, head_dim].
        """

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        """Every token of `batch` attends to its row's text up to itself, or to the last `window` tokens of that.

        What they hold themselves is stored already. q is [tokens, heads, head_dim]. Returns [tokens, heads * head_dim].
        """

    def move(self, keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of pages in every layer: (source, target, tokens).

        Here keys and values are those of all layers, [layers, pages, kv_heads, page, head_dim]. No page is both a
        source and a target, nor the target of two moves.
        """


class TorchKernels:
    """`DecoderKernels` in plain torch, on any device."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return lambda x: functional.linear(x, weight, bias)

    def int8_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        kept = int8.quantized(weight)

        def multiply(x: Tensor) -> Tensor:
            rows = int8.quantized(x)
            product = (rows.values.float() @ kept.values.float().T) * (rows.scale[:, None] * kept.scale)
            return (product if bias is None else product + bias).to(x.dtype)

        return multiply

    def fp8_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return _scaled_linear(*fp8.quantized(weight), bias)

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

    def gated(self, linear: Linear) -> Linear:
        return lambda x: self.gate(linear(x))

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
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q, k, v = qkv.view(len(qkv), -1, head_dim).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        if norms:
            q, k = _norm(q, norms[0], eps), _norm(k, norms[1], eps)
        cos, sin = (table[positions].unsqueeze(1) for table in rotation)
        places = positions % keys.shape[2]
        keys[pages, :, places] = fp8.stored_as(_rotate(k, cos, sin), keys.dtype)
        values[pages, :, places] = fp8.stored_as(v, values.dtype)
        return _rotate(q, cos, sin)

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, batch: Ragged, window: int | None) -> Tensor:
        singles, n = batch.singles, [batch.singles, *(span.tokens for span in batch.spans)]
        first, *rest = q.split_with_sizes(n)
        parts = [self._attend_singles(first, keys, values, batch, window)] if singles else []
        for table, span, chunk in zip(batch.tables[singles:], batch.spans, rest, strict=True):
            stop = span.start + span.tokens
            pages = table[None, : -(-stop // keys.shape[2])]
            k, v = (texts(buffer, pages)[:, :, :stop].to(q.dtype) for buffer in (keys, values))
            parts.append(self._attend_span(chunk, k, v, span.start, window))
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

    def _attend_span(self, q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
        """The tokens of one chunk, from `start` on, with its text, [1, kv_heads, tokens to its end, head_dim]."""
        tokens, heads, head_dim = q.shape
        stop = start + tokens
        whole = not start and (window is None or stop <= window)
        mask = None if whole else _causal(start, stop, window, q.device)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0), k, v, mask, is_causal=whole, enable_gqa=heads != k.shape[1]
        )
        return out[0].transpose(0, 1).reshape(tokens, heads * head_dim)

    def move(self, keys: Tensor, values: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
        for source, target, tokens in moves:
            for buffer in (keys, values):
                buffer[:, target, :, :tokens] = buffer[:, source, :, :tokens]


def _scaled_linear(values: Tensor, scale: Tensor, bias: Tensor | None) -> Linear:
    """Of a weight `values` [out, in] times `scale` [out]."""

    def multiply(x: Tensor) -> Tensor:
        product = (x @ values.to(x.dtype).T).float() * scale
        return (product if bias is None else product + bias).to(x.dtype)

    return multiply


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
