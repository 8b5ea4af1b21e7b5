"""A token for every row of logits on a GPU, in Triton: two launches, whatever the rows ask for, and nothing is sorted.

The first shares all rows out by chunks of the vocabulary. Each chunk finds its greatest logit, what its tokens weigh,
and who wins its race (see `sampling`). The second puts together what the chunks of a row have found. Where the row
filters by top-k, top-p or min-p, it looks whether the winner is kept: it is if few enough tokens are likelier, and
these weigh little enough. If not, nobody who is as likely or less is kept either, and the winner among the likelier
ones is the next to be looked at. The first or second mostly is kept, as most of the probability is.

With top-p and top-k, top-p is a share of what top-k keeps. That is narrowed down until it tells, too.
"""
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from pliant.kernels.decoder import uniform

_CHUNK = 4096
_BLOCK = 8192
_GREATEST = tl.constexpr(torch.finfo(torch.float32).max)
_GOLDEN = tl.constexpr(uniform.GOLDEN)
_MIX_1 = tl.constexpr(uniform.MIX_1)
_MIX_2 = tl.constexpr(uniform.MIX_2)
_ODD = tl.constexpr(uniform.ODD)
_MIX_3 = tl.constexpr(uniform.MIX_3)
_MIX_4 = tl.constexpr(uniform.MIX_4)


def draw(
    logits: Tensor,
    slots: Tensor,
    indices: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
) -> Tensor:
    """The token [n] int64 of each row of `logits` [n, vocab], which has the parameters of its slot, as in `sampling`.

    `slots` [n], and `indices` [n], the places of the tokens in their answers, are integers; the parameters are those
    of all slots. A logit that is not a number counts as the greatest.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, _CHUNK)
    found = logits.new_empty(3, rows, parts, dtype=torch.float32)
    winners = logits.new_empty(rows, parts, dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    asked = (logits, slots, indices, temperature, seed)
    _survey[rows, parts](*asked, *found, winners, vocab, logits.stride(0), chunk=_CHUNK, num_warps=8)
    _choose[rows,](
        *asked,
        top_k,
        top_p,
        min_p,
        *found,
        winners,
        tokens,
        vocab,
        logits.stride(0),
        parts,
        wide=triton.next_power_of_2(parts),
        block=_BLOCK,
        num_warps=16,
    )
    return tokens


@triton.jit
def _survey(
    logits: tl.tensor,
    slots: tl.tensor,
    indices: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    leads: tl.tensor,
    winners: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    chunk: tl.constexpr,
) -> None:
    """Of one chunk of one row: its greatest logit, the weight of its tokens relative to that, the winner, which is the
    first of the greatest where a row is greedy, and how the winner has done."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    tokens = part * chunk + tl.arange(0, chunk)
    x = _read(logits + row * stride, tokens, vocab)
    peak = tl.max(x, 0)
    at = row * tl.num_programs(1) + part
    if temperature > 0:
        weights = _weights(x, peak, temperature)
        low, high = _keys(tl.load(seeds + slot), tl.load(indices + row))
        scores = weights / -tl.log(_uniform(tokens, low, high))
        tl.store(masses + at, tl.sum(weights, 0))
    else:
        scores = (x == peak).to(tl.float32)
    lead, winner = tl.max(scores, 0, return_indices=True)
    tl.store(peaks + at, peak)
    tl.store(leads + at, lead)
    tl.store(winners + at, part * chunk + winner)


@triton.jit
def _choose(
    logits: tl.tensor,
    slots: tl.tensor,
    indices: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    leads: tl.tensor,
    winners: tl.tensor,
    chosen: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    parts: tl.tensor,
    wide: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One row's token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot)
    each = tl.arange(0, wide)
    at = row * parts + each
    its_peaks = tl.load(peaks + at, mask=each < parts, other=-float("inf"))
    peak = tl.max(its_peaks, 0)
    if temperature > 0:
        shares = _weights(its_peaks, peak, temperature)
        scores = tl.load(leads + at, mask=each < parts, other=0.0) * shares
        whole = tl.sum(tl.load(masses + at, mask=each < parts, other=0.0) * shares, 0).to(tl.float64)
        token = tl.load(winners + row * parts + tl.argmax(scores, 0))
        top_k = tl.load(top_ks + slot)
        top_p = tl.load(top_ps + slot)
        min_p = tl.load(min_ps + slot)
        from_row = logits + row * stride
        low, high = _keys(tl.load(seeds + slot), tl.load(indices + row))
        looking = (top_k > 0) | (top_p < 1) | (min_p > 0)
        while looking:
            floor = _read(from_row, token, vocab)
            count, mass, better = _above(from_row, vocab, floor, peak, temperature, min_p, low, high, block)
            kept = ((top_k == 0) | (count < top_k)) & (_weights(floor, peak, temperature) >= min_p)
            if kept & (top_p < 1):
                kept = _in_top_p(from_row, vocab, floor, mass, top_k, top_p, peak, temperature, whole, block)
            looking = (better >= 0) & (kept == 0)
            token = tl.where(looking, better, token)
    else:
        token = tl.load(winners + row * parts + tl.argmax((its_peaks == peak).to(tl.float32), 0))
    tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _above(
    from_row: tl.tensor,
    vocab: tl.tensor,
    floor: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many tokens have a logit above `floor`, what they weigh, and who of them wins: -1 if there are none."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    lead = tl.full([], 0.0, tl.float32)
    winner = tl.full([], -1, tl.int32)
    for first in range(0, vocab, block):
        tokens = first + tl.arange(0, block)
        x = _read(from_row, tokens, vocab)
        weights = tl.where(x > floor, _weights(x, peak, temperature), 0.0)
        count += tl.sum((x > floor).to(tl.int32), 0)
        mass += tl.sum(weights, 0).to(tl.float64)
        racing = tl.where(weights >= min_p, weights, 0.0)
        if tl.max(racing, 0) > 0:
            scores = racing / -tl.log(_uniform(tokens, low, high))
            furthest, its_winner = tl.max(scores, 0, return_indices=True)
            winner = tl.where(furthest > lead, first + its_winner, winner)
            lead = tl.maximum(furthest, lead)
    return count, mass, winner


@triton.jit
def _in_top_p(
    from_row: tl.tensor,
    vocab: tl.tensor,
    floor: tl.tensor,
    mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    whole: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:
    """Whether `mass` is less than the share `top_p` of what the `top_k` likeliest tokens weigh, with those that are as
    likely as the last of them. All tokens weigh `whole`, and those above `floor`, fewer than `top_k`, weigh `mass`.

    The last one's logit lies within `low` and `high`, and what it is about within `least` and `most`. All of these are
    narrowed down until they tell, which the first guess often does.
    """
    low = tl.full([], -_GREATEST, tl.float32)
    high = tl.where(top_k > 0, floor, low)
    least = mass
    most = whole
    middle = floor - 2 * temperature
    while (low < high) & (least * top_p <= mass) & (mass < most * top_p):
        middle = tl.where(middle < high, middle, low)
        count = tl.full([], 0, tl.int32)
        above = tl.full([], 0.0, tl.float64)
        next_above = high
        next_below = tl.full([], -float("inf"), tl.float32)
        for first in range(0, vocab, block):
            x = _read(from_row, first + tl.arange(0, block), vocab)
            is_above = x > middle
            count += tl.sum(is_above.to(tl.int32), 0)
            above += tl.sum(tl.where(is_above, _weights(x, peak, temperature), 0.0), 0).to(tl.float64)
            next_above = tl.minimum(next_above, tl.min(tl.where(is_above, x, high), 0))
            next_below = tl.maximum(next_below, tl.max(tl.where(is_above, -float("inf"), x), 0))
        enough = count >= top_k
        low = tl.where(enough, next_above, low)
        most = tl.where(enough, above, most)
        high = tl.where(enough, high, next_below)
        least = tl.where(enough, least, above)
        middle = low * 0.5 + high * 0.5
    return mass < most * top_p


@triton.jit
def _read(from_row: tl.tensor, tokens: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """Their logits, none of which is above the greatest number."""
    x = tl.load(from_row + tokens, mask=tokens < vocab, other=-float("inf")).to(tl.float32)
    return tl.where(x < _GREATEST, x, _GREATEST)


@triton.jit
def _weights(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """How likely the tokens of logits `x` are, relative to one of logit `peak`; 0 if all are banned."""
    return tl.exp((x - tl.maximum(peak, -_GREATEST)) * (1 / temperature))


@triton.jit
def _uniform(tokens: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """`uniform.uniform`, of the halves of its key."""
    bits = _mix_32(_mix_32(tokens * _ODD + low) ^ high)
    return (_shifted(bits, 9).to(tl.float32) + 0.5) * (2.0**-23)


@triton.jit
def _keys(seed: tl.tensor, index: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The halves of the key that `uniform.uniform` makes of them."""
    key = _mix_64(_mix_64(seed + _GOLDEN) + (index.to(tl.int64) + 1) * _GOLDEN)
    return key.to(tl.int32), (key >> 32).to(tl.int32)


@triton.jit
def _mix_64(bits: tl.tensor) -> tl.tensor:
    bits = (bits ^ _shifted_64(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted_64(bits, 27)) * _MIX_2
    return bits ^ _shifted_64(bits, 31)


@triton.jit
def _mix_32(bits: tl.tensor) -> tl.tensor:
    bits = (bits ^ _shifted(bits, 16)) * _MIX_3
    bits = (bits ^ _shifted(bits, 15)) * _MIX_4
    return bits ^ _shifted(bits, 16)


@triton.jit
def _shifted_64(bits: tl.tensor, places: tl.constexpr) -> tl.tensor:
    return (bits.to(tl.uint64, bitcast=True) >> places).to(tl.int64, bitcast=True)


@triton.jit
def _shifted(bits: tl.tensor, places: tl.constexpr) -> tl.tensor:
    return (bits.to(tl.uint32, bitcast=True) >> places).to(tl.int32, bitcast=True)
