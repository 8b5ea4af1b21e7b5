"""Merging of tokens on a GPU, in Triton: three launches a layer, where torch takes sixty (see `token_merging`).

The first finds each token's best match of the other side. The second ranks these by counting, as they are few, and says
where every token goes; nothing is sorted. The third adds attention's result to the tokens and merges them. Similarities
and means are computed in float32, of which the matrix products of half precision have eleven bits.
"""
# mypy: disallow-untyped-decorators=False

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.kernels.vision.token_merging import Matching

_BLOCK = 64
"""Tokens of a side that a program takes at a time."""
_LEAST = 16


class Merged(NamedTuple):
    """What `token_merging.merge` gives: tokens [n, tokens - r, c] and their sizes, float32 [n, tokens - r]."""

    tokens: Tensor
    sizes: Tensor


def match(keys: Tensor, prefix: int, r: int) -> Matching:
    """As `token_merging.match`, of keys [n, tokens, heads, dim] that are added up over the heads; int32."""
    samples, tokens, heads, dim = keys.shape
    count, others = (tokens - prefix) // 2, (tokens - prefix + 1) // 2
    best = keys.new_empty(samples, count, dtype=torch.float32)
    partner, kept, merged, into = (
        keys.new_empty(samples, size, dtype=torch.int32) for size in (count, tokens - r, r, r)
    )
    _best[samples, triton.cdiv(count, _BLOCK)](
        keys,
        best,
        partner,
        *keys.stride()[:3],
        count,
        others,
        prefix=prefix,
        heads=heads,
        dim=dim,
        precise=keys.dtype is torch.float32,
        block_dim=_block(dim),
        block=_BLOCK,
        num_warps=4,
    )
    _arrange[samples,](
        best, partner, kept, merged, into, count, others, r, prefix=prefix, block=_block(count + 1), part=_LEAST
    )
    return Matching(kept, merged, into)


def merge(x: Tensor, attended: Tensor, sizes: Tensor, matching: Matching) -> Merged:
    """As `token_merging.merge` of x + attended, both [n, tokens, c]."""
    (samples, tokens, width), (kept, merged, into) = x.shape, matching
    left, r = kept.shape[1], merged.shape[1]
    out, new_sizes = x.new_empty(samples, left, width), sizes.new_empty(samples, left)
    x, attended = x.contiguous(), attended.contiguous()
    arguments = (x, attended, sizes, kept, merged, into, out, new_sizes, tokens, left, r)
    _merge[samples, left](*arguments, width=width, block_r=_block(r), block=_block(width), num_warps=4)
    return Merged(out, new_sizes)


def _block(size: int) -> int:
    found: int = triton.next_power_of_2(size)
    return max(_LEAST, found)


@triton.jit
def _best(
    keys: tl.tensor,
    best: tl.tensor,
    partner: tl.tensor,
    sample_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    count: tl.tensor,
    others: tl.tensor,
    prefix: tl.constexpr,
    heads: tl.constexpr,
    dim: tl.constexpr,
    precise: tl.constexpr,
    block_dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Of some tokens of one sample's first side: how alike the most alike of the other side is, and which that is."""
    sample = tl.program_id(0).to(tl.int64)
    its_keys = keys + sample * sample_stride
    mine = tl.program_id(1) * block + tl.arange(0, block)
    own = _directions(
        its_keys, prefix + 1 + 2 * mine, mine < count, token_stride, head_stride, heads, dim, precise, block_dim, block
    )
    highest = tl.full([block], -float("inf"), tl.float32)
    who = tl.zeros([block], tl.int32)
    for first in range(0, others, block):
        theirs = first + tl.arange(0, block)
        there = theirs < others
        other = _directions(
            its_keys, prefix + 2 * theirs, there, token_stride, head_stride, heads, dim, precise, block_dim, block
        )
        alike = tl.dot(own, tl.trans(other), input_precision="ieee")
        alike = tl.where(there[None, :], alike, -float("inf"))
        its_highest, at = tl.max(alike, 1, return_indices=True)
        better = its_highest > highest
        who = tl.where(better, first + at, who)
        highest = tl.where(better, its_highest, highest)
    tl.store(best + sample * count + mine, highest, mask=mine < count)
    tl.store(partner + sample * count + mine, who, mask=mine < count)


@triton.jit
def _directions(
    keys: tl.tensor,
    tokens: tl.tensor,
    there: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    precise: tl.constexpr,
    block_dim: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """The keys of these tokens, summed over the heads, as vectors of length 1."""
    within = tl.arange(0, block_dim)
    at = keys + tokens[:, None] * token_stride + within[None, :]
    inside = there[:, None] & (within < dim)[None, :]
    sums = tl.zeros([block, block_dim], tl.float32)
    for head in range(heads):
        sums += tl.load(at + head * head_stride, mask=inside, other=0.0).to(tl.float32)
    sums = sums / tl.maximum(tl.sqrt(tl.sum(sums * sums, 1)), 1e-12)[:, None]
    if not precise:
        sums = sums.to(tl.float16)
    return sums


@triton.jit
def _arrange(
    best: tl.tensor,
    partner: tl.tensor,
    kept: tl.tensor,
    merged: tl.tensor,
    into: tl.tensor,
    count: tl.tensor,
    others: tl.tensor,
    r: tl.tensor,
    prefix: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
) -> None:
    """Where the tokens of one sample go (see `Matching`). What is not a number is alike to nothing."""
    sample = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, block)
    there = each < count
    its = tl.load(best + sample * count + each, mask=there, other=-float("inf"))
    its = tl.where(its == its, its, -float("inf"))
    rank = tl.zeros([block], tl.int32)
    for first in range(0, count, part):
        other = first + tl.arange(0, part)
        theirs = tl.load(best + sample * count + other, mask=other < count, other=-float("inf"))
        theirs = tl.where(theirs == theirs, theirs, -float("inf"))
        before = (theirs[None, :] == its[:, None]) & (other[None, :] < each[:, None])
        ahead = ((theirs[None, :] > its[:, None]) | before) & (other < count)[None, :]
        rank += tl.sum(ahead.to(tl.int32), 1)
    goes = there & (rank < r)
    stays = there & (rank >= r)
    staying = count - r
    to = kept + sample * (prefix + staying + others)
    old = prefix + 1 + 2 * each
    tl.store(to + each, each, mask=each < prefix)
    tl.store(to + prefix + tl.cumsum(stays.to(tl.int32), 0) - 1, old, mask=stays)
    tl.store(to + prefix + staying + each, prefix + 2 * each, mask=each < others)
    whom = tl.load(partner + sample * count + each, mask=there, other=0)
    tl.store(merged + sample * r + rank, old, mask=goes)
    tl.store(into + sample * r + rank, prefix + staying + whom, mask=goes)


@triton.jit
def _merge(
    x: tl.tensor,
    attended: tl.tensor,
    sizes: tl.tensor,
    kept: tl.tensor,
    merged: tl.tensor,
    into: tl.tensor,
    out: tl.tensor,
    new_sizes: tl.tensor,
    tokens: tl.tensor,
    left: tl.tensor,
    r: tl.tensor,
    width: tl.constexpr,
    block_r: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One token of one sample after merging."""
    sample = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    columns = tl.arange(0, block)
    inside = columns < width
    old = sample * tokens + tl.load(kept + sample * left + place)
    row = _added(x, attended, old, width, columns, inside)
    size = tl.load(sizes + old)
    joining = tl.arange(0, block_r)
    joins = tl.load(into + sample * r + joining, mask=joining < r, other=-1) == place
    if tl.sum(joins.to(tl.int32), 0) > 0:
        mixed = row.to(tl.float32) * size
        for index in range(r):
            if tl.load(into + sample * r + index) == place:
                other = sample * tokens + tl.load(merged + sample * r + index)
                its = tl.load(sizes + other)
                mixed += _added(x, attended, other, width, columns, inside).to(tl.float32) * its
                size += its
        row = (mixed / size).to(row.dtype)
    tl.store(out + (sample * left + place) * width + columns, row, mask=inside)
    tl.store(new_sizes + sample * left + place, size)


@triton.jit
def _added(
    x: tl.tensor,
    attended: tl.tensor,
    token: tl.tensor,
    width: tl.constexpr,
    columns: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    at = token * width + columns
    sums = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    sums += tl.load(attended + at, mask=inside, other=0.0).to(tl.float32)
    return sums.to(x.dtype.element_ty)
