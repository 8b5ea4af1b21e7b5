"""Attention of a decode step on a GPU, in Triton: one token of every row, however their lengths differ (Flover §V-D).

Every row's pages and length are read on the device, so that one recorded CUDA graph serves every window of the slots.
Texts are split (flash-decoding), as a few rows alone would leave most of a GPU idle: each program takes a share of one
row's text for all the query heads that share a key head, and a second kernel merges the shares. Softmax is computed in
float32.
"""
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_ENDLESS = 2**30
_TILE_BYTES = 16384  # of keys, and of values, that a program holds at a time


def attend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, positions: Tensor, window: int | None, splits: int
) -> Tensor:
    """Row i of q [n, heads, head_dim] attends to the tokens of its text up to positions[i], or the last `window`.

    The text's pages are tables[i]. It is divided among `splits` programs for each key head, a power of two. Returns
    [n, heads * head_dim].
    """
    rows, heads, head_dim = q.shape
    _, kv_heads, page, _ = keys.shape
    group = heads // kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))
    out = q.new_empty(rows, heads * head_dim)
    parts = q.new_empty((rows, heads, splits, head_dim) if splits > 1 else 1, dtype=torch.float32)
    logs = q.new_empty((rows, heads, splits) if splits > 1 else 1, dtype=torch.float32)
    _attend[rows, kv_heads, splits](
        q,
        keys,
        values,
        tables,
        positions,
        out,
        parts,
        logs,
        head_dim**-0.5 * _LOG2_E,
        tables.stride(0),
        keys.stride(0),
        _ENDLESS if window is None else window,
        group=group,
        head_dim=head_dim,
        page=page,
        splits=splits,
        block_group=max(16, triton.next_power_of_2(group)),
        block_dim=block_dim,
        block_tokens=min(128, max(16, _TILE_BYTES // (block_dim * keys.element_size()))),
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _merge[rows, heads](parts, logs, out, head_dim=head_dim, splits=splits, block_dim=block_dim, num_warps=4)
    return out


@triton.jit
def _attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    logs: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    window: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page: tl.constexpr,
    splits: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    block_tokens: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    length = tl.load(positions + row) + 1
    first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, splits), block_tokens) * block_tokens
    start = first + split * share
    stop = tl.minimum(start + share, length)

    in_group = tl.arange(0, block_group)
    dims = tl.arange(0, block_dim)
    tokens = tl.arange(0, block_tokens)
    heads = (row * kv_heads + kv_head) * group + in_group
    part_of = in_group < group
    in_head = dims < head_dim
    at_heads = heads[:, None] * head_dim + dims[None, :]
    stored = part_of[:, None] & in_head[None, :]
    queries = tl.load(q + at_heads, mask=stored, other=0.0)
    table = tables + row * table_stride

    top = tl.full([block_group], float("-inf"), tl.float32)
    total = tl.zeros([block_group], tl.float32)
    mixed = tl.zeros([block_group, block_dim], tl.float32)
    for at in range(start, stop, block_tokens):
        places = at + tokens
        inside = places < stop
        pages = tl.load(table + places // page, mask=inside, other=0).to(tl.int64)
        text = pages * page_stride + (kv_head * page + places % page) * head_dim
        by_column = text[None, :] + dims[:, None]
        k = tl.load(keys + by_column, mask=inside[None, :] & in_head[:, None], other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(top - highest)
        by_row = text[:, None] + dims[None, :]
        v = tl.load(values + by_row, mask=inside[:, None] & in_head[None, :], other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        top = highest

    divisor = tl.where(total > 0, total, 1.0)
    mixed = mixed / divisor[:, None]
    if splits == 1:
        tl.store(out + at_heads, mixed.to(out.dtype.element_ty), mask=stored)
    else:
        at_parts = (heads[:, None] * splits + split) * head_dim + dims[None, :]
        tl.store(parts + at_parts, mixed, mask=stored & (start < stop))
        tl.store(logs + heads * splits + split, top + tl.log2(divisor), mask=part_of)


@triton.jit
def _merge(
    parts: tl.tensor,
    logs: tl.tensor,
    out: tl.tensor,
    head_dim: tl.constexpr,
    splits: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:
    """Weigh the shares of one row's head by what their softmax summed to; a share with no tokens has the log -inf."""
    head = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    shares = head * splits + tl.arange(0, splits)
    dims = tl.arange(0, block_dim)
    sums = tl.load(logs + shares)
    taken = sums > float("-inf")
    top = tl.max(sums, 0)
    weights = tl.where(taken, tl.exp2(sums - top), 0.0)
    total = tl.sum(weights, 0)
    in_head = dims < head_dim
    mixed = tl.load(
        parts + shares[:, None] * head_dim + dims[None, :], mask=taken[:, None] & in_head[None, :], other=0.0
    )
    merged = tl.sum(mixed * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * head_dim + dims, merged.to(out.dtype.element_ty), mask=in_head)
