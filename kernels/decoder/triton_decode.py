"""A pass's small kernels on a GPU, in Triton: norms, gates, rotations, and moves of pages.

Norms and rotations are computed in float32, and results are rounded where `TorchKernels` rounds them.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.kernels.decoder import triton_overlap
from pliant.kernels.decoder.kernels import Norms, Rotation
from pliant.kernels.decoder.triton_fp8 import stored
from pliant.kernels.decoder.triton_overlap import take_turn

_BLOCK = 1024  # elements of a gated row for each program
_MOVED = 4096  # elements that each program copies


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `DecoderKernels.add_norm`."""
    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    added = hidden if delta is None else delta
    warps, options = min(16, max(1, block // 512)), triton_overlap.options(rows)
    adds = delta is not None
    _add_norm[rows,](hidden, added, weight, out, eps, width, adds=adds, block=block, num_warps=warps, **options)
    return out


def gate(gate_up: Tensor) -> Tensor:
    """See `DecoderKernels.gate`."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    grid = rows, triton.cdiv(width // 2, _BLOCK)
    _gate[grid](gate_up, out, width // 2, block=_BLOCK, num_warps=4, **triton_overlap.options(rows))
    return out


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    pages: Tensor,
    rotation: Rotation,
    norms: Norms | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """See `DecoderKernels.rotate_and_store`."""
    rows, width = qkv.shape
    _, kv_heads, page, head_dim = keys.shape
    heads = width // head_dim - 2 * kv_heads
    group = heads // kv_heads
    q = qkv.new_empty(rows, heads, head_dim)
    _rotate_and_store[rows, kv_heads](
        qkv,
        positions,
        pages,
        *rotation,
        *(norms or (qkv, qkv)),
        eps,
        keys,
        values,
        q,
        keys.stride(0),
        normalises=norms is not None,
        group=group,
        head_dim=head_dim,
        page=page,
        block_heads=triton.next_power_of_2(group + 1),
        block_dim=triton.next_power_of_2(head_dim),
        block_half=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
        **triton_overlap.options(rows),
    )
    return q


def move(keys: Tensor, values: Tensor, places: Tensor, moves: Sequence[tuple[int, int, int]]) -> None:
    """See `DecoderKernels.move`; `places` [moves, 3] int64 is `moves` on the device. One launch moves all layers."""
    layers, _, kv_heads, _, head_dim = keys.shape
    longest = max(tokens for _, _, tokens in moves)
    blocks = triton.cdiv(longest * head_dim, _MOVED)
    if blocks:
        grid = blocks, layers * kv_heads, len(moves)
        strides = keys.stride()[:3]
        _move[grid](keys, values, places, kv_heads, *strides, head_dim=head_dim, block=_MOVED, num_warps=4)


@triton.jit
def _add_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    adds: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    take_turn(overlaps)
    columns = tl.arange(0, block)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    x = tl.load(hidden + at, mask=inside, other=0.0)
    if adds:
        x = (x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(hidden + at, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = normed.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, block: tl.constexpr, overlaps: tl.constexpr) -> None:
    take_turn(overlaps)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = gate_up + row * 2 * width + columns
    x = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + width, mask=inside, other=0.0)
    tl.store(out + row * width + columns, silu_times(x, up), mask=inside)


@triton.jit
def silu_times(x: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(x) * up, rounded to their dtype after each."""
    wide = x.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(up.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(up.dtype)


@triton.jit
def _rotate_and_store(
    qkv: tl.tensor,
    positions: tl.tensor,
    pages: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q: tl.tensor,
    page_stride: tl.tensor,
    normalises: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
    block_half: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """One key head of one row, its value, and the queries that attend to it: `group` queries, then the key."""
    take_turn(overlaps)
    half: tl.constexpr = head_dim // 2
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    position = tl.load(positions + row)
    place = tl.load(pages + row).to(tl.int64) * page_stride + (kv_head * page + position % page) * head_dim
    from_row = qkv + row * (group + 2) * kv_heads * head_dim

    heads = tl.arange(0, block_heads)
    dims = tl.arange(0, block_half)
    in_half = dims < half
    is_query = heads < group
    is_key = heads == group
    head = tl.where(is_query, kv_head * group + heads, kv_heads * group + kv_head)
    read = (is_query | is_key)[:, None] & in_half[None, :]
    at = head[:, None] * head_dim + dims[None, :]
    first = tl.load(from_row + at, mask=read, other=0.0).to(tl.float32)
    second = tl.load(from_row + at + half, mask=read, other=0.0).to(tl.float32)
    if normalises:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / head_dim
        factor = tl.rsqrt(mean + eps)
        first = _scaled(first, factor, q_norm, k_norm, is_query, dims, in_half, q.dtype.element_ty)
        second = _scaled(second, factor, q_norm + half, k_norm + half, is_query, dims, in_half, q.dtype.element_ty)
    angle = position * head_dim + dims
    cosine = tl.load(cosines + angle, mask=in_half, other=0.0)[None, :]
    sine = tl.load(sines + angle, mask=in_half, other=0.0)[None, :]
    turned = (first * cosine - second * sine).to(q.dtype.element_ty)
    turned_second = (second * cosine + first * sine).to(q.dtype.element_ty)

    to_query = q + row * kv_heads * group * head_dim + at
    tl.store(to_query, turned, mask=is_query[:, None] & in_half[None, :])
    tl.store(to_query + half, turned_second, mask=is_query[:, None] & in_half[None, :])
    to_key = keys + place + tl.broadcast_to(dims[None, :], [block_heads, block_half])
    is_stored = is_key[:, None] & in_half[None, :]
    tl.store(to_key, stored(turned, keys.dtype.element_ty), mask=is_stored)
    tl.store(to_key + half, stored(turned_second, keys.dtype.element_ty), mask=is_stored)

    whole = tl.arange(0, block_dim)
    in_head = whole < head_dim
    value = tl.load(from_row + ((group + 1) * kv_heads + kv_head) * head_dim + whole, mask=in_head, other=0.0)
    tl.store(values + place + whole, stored(value, values.dtype.element_ty), mask=in_head)


@triton.jit
def _scaled(
    x: tl.tensor,
    factor: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    is_query: tl.tensor,
    dims: tl.tensor,
    inside: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Half of each head, times its factor and the weights of its norm, rounded to `dtype` after each."""
    for_q = tl.load(q_norm + dims, mask=inside, other=0.0).to(tl.float32)
    for_k = tl.load(k_norm + dims, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], for_q[None, :], for_k[None, :])
    return ((x * factor[:, None]).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _move(
    keys: tl.tensor,
    values: tl.tensor,
    moves: tl.tensor,
    kv_heads: tl.tensor,
    layer_stride: tl.tensor,
    page_stride: tl.tensor,
    head_stride: tl.tensor,
    head_dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A block of one move's tokens, in one head of one layer."""
    plane = tl.program_id(1)
    numbers = moves + tl.program_id(2) * 3
    source = tl.load(numbers)
    target = tl.load(numbers + 1)
    tokens = tl.load(numbers + 2)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < tokens * head_dim
    head = (plane // kv_heads).to(tl.int64) * layer_stride + (plane % kv_heads).to(tl.int64) * head_stride
    from_page = head + source * page_stride + at
    to_page = head + target * page_stride + at
    tl.store(keys + to_page, tl.load(keys + from_page, mask=inside), mask=inside)
    tl.store(values + to_page, tl.load(values + from_page, mask=inside), mask=inside)
