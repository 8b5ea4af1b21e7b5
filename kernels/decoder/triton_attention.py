"""Attention over pages on a GPU, in Triton: decode rows and chunks of prompts, however their texts differ in length.

What each program does is read from tables on the device (see `attention_work`), so that one recorded CUDA graph serves
every window of the slots, and nothing is compiled anew as texts grow. Programs that share a row's text leave what they
found to a second kernel, which merges it. A program serves all query heads that share a key head: keys and values are
read once, and never repeated. Softmax is computed in float32.
"""
# mypy: disallow-untyped-decorators=False

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.kernels.decoder import triton_overlap
from pliant.kernels.decoder.attention_work import FIELDS
from pliant.kernels.decoder.triton_fp8 import widened, widens_by_hand
from pliant.kernels.decoder.triton_overlap import ASKED_BYTES, ask_for, let_next_begin, take_turn, wait

_LOG2_E = 1.4426950408889634
_ENDLESS = 2**30
_TILE_BYTES = 16384  # of keys, and of values, that a program holds at a time
_LEAST = 16
"""Rows that a matrix product on a GPU takes at least."""
_AHEAD_PAGES = tl.constexpr(2)
"""That a program asks for before it may begin: what all ask for fits into a GPU's cache."""
_CHUNK_ROWS = 64
"""Queries of a chunk, counting each head, that a program holds."""


class WorkTensors(NamedTuple):
    """An `attention_work.Work` on the device."""

    bounds: Tensor
    items: Tensor
    shares: Tensor


def tile(head_dim: int, itemsize: int) -> int:
    """Keys that a program takes at a time; of fp8 as many as of what it converts them to."""
    return min(128, max(16, _TILE_BYTES // (_block_dim(head_dim) * max(2, itemsize))))


def chunk_tokens(group: int) -> int:
    """Tokens of a chunk that a program takes at most, where `group` heads share a key head."""
    return max(1, _CHUNK_ROWS // group)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    work: WorkTensors,
    window: int | None,
    out: Tensor,
    chunked: bool,
) -> None:
    """Fill the rows of `out` [tokens, heads * head_dim] that `work` names, from `q` [tokens, heads, head_dim].

    Row i's text lies in the pages tables[i]. Items have one token each, or if `chunked` up to `chunk_tokens`.
    """
    _, heads, head_dim = q.shape
    _, kv_heads, page, _ = keys.shape
    group = heads // kv_heads
    asking = group * (chunk_tokens(group) if chunked else 1)
    programs, rows, options = len(work.bounds) - 1, len(work.shares), triton_overlap.options(len(q))
    parts = q.new_empty((len(work.items), heads, head_dim) if rows else 1, dtype=torch.float32)
    logs = q.new_empty((len(work.items), heads) if rows else 1, dtype=torch.float32)
    _attend[programs, kv_heads](
        q,
        keys,
        values,
        tables,
        work.bounds,
        work.items,
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
        fields=FIELDS,
        block_rows=max(_LEAST, triton.next_power_of_2(asking)),
        block_dim=_block_dim(head_dim),
        block_tokens=tile(head_dim, keys.element_size()),
        by_hand=widens_by_hand(),
        asks_ahead=options["overlaps"] and head_dim * keys.element_size() % ASKED_BYTES == 0,
        num_warps=4,
        num_stages=2,
        **options,
    )
    if rows:
        _merge[rows, heads](
            parts, logs, work.shares, out, head_dim=head_dim, block_dim=_block_dim(head_dim), num_warps=4, **options
        )


def _block_dim(head_dim: int) -> int:
    size: int = triton.next_power_of_2(head_dim)
    return max(_LEAST, size)


@triton.jit(do_not_specialize=["table_stride", "window"])
def _attend(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    bounds: tl.tensor,
    items: tl.tensor,
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
    fields: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    by_hand: tl.constexpr,
    asks_ahead: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """The items of one program for one key head. Rows are the queries of an item: token by token, head by head."""
    let_next_begin(overlaps)
    kv_head = tl.program_id(1)
    if asks_ahead:
        _ask_ahead(keys, values, tables, bounds, items, table_stride, page_stride, page, head_dim, fields)
    wait(overlaps)
    kv_heads = tl.num_programs(1)
    lanes = tl.arange(0, block_rows)
    dims = tl.arange(0, block_dim)
    tokens = tl.arange(0, block_tokens)
    in_head = dims < head_dim
    head = kv_head * group + lanes % group
    for index in range(tl.load(bounds + tl.program_id(0)), tl.load(bounds + tl.program_id(0) + 1)):
        item = items + index * fields
        table = tables + tl.load(item).to(tl.int64) * table_stride
        position = tl.load(item + 2) + lanes // group
        start = tl.load(item + 4)
        stop = tl.load(item + 5)
        asks = lanes // group < tl.load(item + 3)
        stored = asks[:, None] & in_head[None, :]
        of_head = (tl.load(item + 1) + lanes // group) * (kv_heads * group) + head
        at_heads = of_head.to(tl.int64)[:, None] * head_dim + dims[None, :]
        queries = tl.load(q + at_heads, mask=stored, other=0.0)

        top = tl.full([block_rows], float("-inf"), tl.float32)
        total = tl.zeros([block_rows], tl.float32)
        mixed = tl.zeros([block_rows, block_dim], tl.float32)
        for at in range(start, stop, block_tokens):
            places = at + tokens
            inside = places < stop
            pages = tl.load(table + places // page, mask=inside, other=0).to(tl.int64)
            text = pages * page_stride + (kv_head * page + places % page) * head_dim
            k = tl.load(keys + text[None, :] + dims[:, None], mask=inside[None, :] & in_head[:, None], other=0.0)
            scores = tl.dot(queries, widened(k, queries.dtype, by_hand), input_precision="ieee") * scale
            seen = (places[None, :] <= position[:, None]) & (places[None, :] > position[:, None] - window)
            scores = tl.where(inside[None, :] & seen, scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(highest > float("-inf"), highest, 0.0)
            weights = tl.exp2(scores - finite[:, None])
            kept = tl.exp2(top - finite)
            v = tl.load(values + text[:, None] + dims[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
            v = widened(v, queries.dtype, by_hand)
            mixed = mixed * kept[:, None] + tl.dot(weights.to(queries.dtype), v, input_precision="ieee")
            total = total * kept + tl.sum(weights, 1)
            top = highest

        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        if tl.load(item + 6) == 0:
            tl.store(out + at_heads, mixed.to(out.dtype.element_ty), mask=stored)
        else:
            part = index * kv_heads * group + head
            tl.store(parts + part[:, None] * head_dim + dims[None, :], mixed, mask=stored)
            tl.store(logs + part, top + tl.log2(total), mask=asks)


@triton.jit
def _ask_ahead(
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    bounds: tl.tensor,
    items: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    page: tl.constexpr,
    head_dim: tl.constexpr,
    fields: tl.constexpr,
) -> None:
    """Ask for the first pages of a program's first item. Tables and lists are copied to the GPU, by no kernel."""
    index = tl.load(bounds + tl.program_id(0))
    if index < tl.load(bounds + tl.program_id(0) + 1):
        item = items + index * fields
        first = tl.load(item + 4) // page
        last = (tl.load(item + 5) - 1) // page
        pages = tl.minimum(first + tl.arange(0, _AHEAD_PAGES), tl.maximum(last, first))
        table = tables + tl.load(item).to(tl.int64) * table_stride
        at = tl.load(table + pages).to(tl.int64) * page_stride + tl.program_id(1) * page * head_dim
        ask_for(keys + at, page * head_dim)
        ask_for(values + at, page * head_dim)


@triton.jit
def _merge(
    parts: tl.tensor,
    logs: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    overlaps: tl.constexpr,
) -> None:
    """Weigh what programs found for one row's head by what their softmax summed to, if there were several."""
    take_turn(overlaps)
    heads = tl.num_programs(1)
    first = tl.load(shares + tl.program_id(0) * 2)
    count = tl.load(shares + tl.program_id(0) * 2 + 1)
    if count > 1:
        dims = tl.arange(0, block_dim)
        in_head = dims < head_dim
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        merged = tl.zeros([block_dim], tl.float32)
        for begin in range(0, count, 16):
            places = begin + tl.arange(0, 16)
            part = (first + places) * heads + tl.program_id(1)
            sums = tl.load(logs + part, mask=places < count, other=float("-inf"))
            found = tl.load(
                parts + part[:, None] * head_dim + dims[None, :],
                mask=(places < count)[:, None] & in_head[None, :],
                other=0.0,
            )
            highest = tl.maximum(top, tl.max(sums, 0))
            weights = tl.exp2(sums - highest)
            kept = tl.exp2(top - highest)
            merged = merged * kept + tl.sum(found * weights[:, None], 0)
            total = total * kept + tl.sum(weights, 0)
            top = highest
        to = out + (tl.program_id(0) * heads + tl.program_id(1)).to(tl.int64) * head_dim + dims
        tl.store(to, (merged / total).to(out.dtype.element_ty), mask=in_head)
