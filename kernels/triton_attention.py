"""Attention within packed texts, or images, on a GPU, in Triton: one launch for all, however their lengths differ.

Each program takes some queries of one text and head past all keys that they attend to, with a softmax in blocks, in
float32.
"""
# mypy: disallow-untyped-decorators=False

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_LOG2_E = 1.4426950408889634
_KEYS = 64
_QUERIES = 64
_NO_TEXT = -1


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    window: int | None,
    firsts: bool,
    times: Tensor | None = None,
    blocks: Tensor | None = None,
) -> Tensor:
    """Queries, keys and values [tokens, heads, dim] of packed texts: [tokens, heads * dim].

    `starts`, int64 [texts + 1], are where texts begin, and where the last one ends; `longest` is a bound of their
    lengths; `window` and `firsts` are as in `Layout.attend`. Tokens count as often as `times`, float32 [tokens], say.
    Where lengths differ, `blocks` (see `blocks_of`) save programs that would have nothing to do.
    """
    tokens, heads, dim = q.shape
    texts = len(starts) - 1
    out = q.new_empty(texts if firsts else tokens, heads * dim)
    attending = 1 if firsts else longest
    queries = 16 if attending <= 16 and blocks is None else _QUERIES
    grid = (triton.cdiv(attending, queries), texts, heads) if blocks is None else (1, len(blocks), heads)
    _attend[grid](
        q,
        k,
        v,
        starts,
        starts if times is None else times,
        starts if blocks is None else blocks,
        out,
        dim**-0.5 * _LOG2_E,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q.stride(1),
        k.stride(1),
        v.stride(1),
        longest if window is None else window,
        heads=heads,
        dim=dim,
        firsts=firsts,
        counts=times is not None,
        by_blocks=blocks is not None,
        precise=q.dtype is torch.float32,
        block_dim=max(16, triton.next_power_of_2(dim)),
        queries=queries,
        keys=_KEYS,
        num_warps=4,
        num_stages=2,
    )
    return out


def most_blocks(tokens: int, texts: int) -> int:
    """Of so many texts that have so many tokens together."""
    return tokens // _QUERIES + texts


def blocks_of(lengths: Sequence[int], count: int) -> NDArray[np.int32]:
    """What each program takes, its text and the first of its queries, int32 [count, 2]; text -1 stands for nothing."""
    blocks = np.full((count, 2), _NO_TEXT, np.int32)
    numbers = [-(-length // _QUERIES) for length in lengths]
    texts = np.repeat(np.arange(len(lengths)), numbers)
    blocks[: len(texts), 0] = texts
    begins = np.cumsum([0, *numbers])[:-1]
    blocks[: len(texts), 1] = (np.arange(len(texts)) - np.repeat(begins, numbers)) * _QUERIES
    return blocks


@triton.jit(do_not_specialize=["window"])
def _attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    starts: tl.tensor,
    times: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    q_head: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    window: tl.tensor,
    heads: tl.constexpr,
    dim: tl.constexpr,
    firsts: tl.constexpr,
    counts: tl.constexpr,
    by_blocks: tl.constexpr,
    precise: tl.constexpr,
    block_dim: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
) -> None:
    text, head = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * queries
    if by_blocks:
        first = tl.load(blocks + 2 * text + 1)
        text = tl.load(blocks + 2 * text)
        if text < 0:
            return
    start = tl.load(starts + text)
    length = tl.load(starts + text + 1) - start
    attending = 1 if firsts else length
    if first >= attending:
        return
    rows = first + tl.arange(0, queries)
    within = tl.arange(0, block_dim)
    mine = (rows < attending)[:, None] & (within < dim)[None, :]
    asked = tl.load(q + (start + rows)[:, None] * q_stride + head * q_head + within[None, :], mask=mine, other=0.0)
    largest = tl.full([queries], -float("inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, block_dim], tl.float32)
    begin = tl.maximum(first - window, 0) // keys * keys
    end = tl.minimum(first + queries + window, length)
    for block in range(begin, end, keys):
        places = block + tl.arange(0, keys)
        there = (places < length)[:, None] & (within < dim)[None, :]
        key = tl.load(k + (start + places)[:, None] * k_stride + head * k_head + within[None, :], mask=there, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee" if precise else "tf32") * scale
        if counts:
            often = tl.load(times + start + places, mask=places < length, other=1.0)
            scores += tl.log2(often)[None, :]
        near = tl.abs(rows[:, None] - places[None, :]) <= window
        scores = tl.where((places < length)[None, :] & near, scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(now == -float("inf"), 0.0, now)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(largest - safe)
        value = tl.load(
            v + (start + places)[:, None] * v_stride + head * v_head + within[None, :], mask=there, other=0.0
        )
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(value.dtype), value, input_precision="ieee" if precise else "tf32")
        largest = now
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    row = text if firsts else start + rows
    into = out + row * (heads * dim) if firsts else out + row[:, None] * (heads * dim)
    tl.store(into + head * dim + within[None, :] + tl.zeros([queries, 1], tl.int32), mixed, mask=mine)
