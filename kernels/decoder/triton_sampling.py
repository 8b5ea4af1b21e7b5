"""Which tokens top-k and top-p keep, on a GPU, in Triton: found by their values' bits, without sorting a vocabulary."""
# mypy: disallow-untyped-decorators=False

import math

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def keep_top_k(scores: Tensor, top_k: Tensor) -> None:
    """See `sampling.keep_top_k`."""
    _keep[len(scores),](scores, top_k.double(), scores.shape[1], -math.inf, counts=True, block=_BLOCK, num_warps=8)


def keep_top_p(probabilities: Tensor, top_p: Tensor) -> None:
    """See `sampling.keep_top_p`."""
    limits = top_p.where(top_p < 1, 0.0)
    _keep[len(probabilities),](
        probabilities, limits, probabilities.shape[1], 0.0, counts=False, block=_BLOCK, num_warps=8
    )


@triton.jit
def _keep(
    values: tl.tensor,
    limits: tl.tensor,
    vocab: tl.tensor,
    fill: tl.tensor,
    counts: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Fill one row's float32 values below the least v such that all above v count, or sum up to, less than its limit;
    a limit of 0 keeps all.

    v is found from its highest bits on, four in each pass over the row.
    """
    row = values + tl.program_id(0).to(tl.int64) * vocab
    limit = tl.load(limits + tl.program_id(0))
    if limit > 0:
        lowest = tl.full([], -(2**31), tl.int64)
        for digit in range(8):
            size = tl.full([], 1, tl.int64) << (28 - 4 * digit)
            bounds = (lowest + (tl.arange(0, 16) + 1) * size - 1).to(tl.int32)
            above = tl.zeros([16], tl.float64)
            for first in range(0, vocab, block):
                at = first + tl.arange(0, block)
                x = tl.load(row + at, mask=at < vocab, other=-float("inf"))
                weights = tl.full([block], 1.0, tl.float32) if counts else x
                is_above = _ordered(x)[:, None] > bounds[None, :]
                above += tl.sum(tl.where(is_above, weights[:, None], 0.0), 0).to(tl.float64)
            lowest += tl.sum((above >= limit).to(tl.int64), 0) * size
        for first in range(0, vocab, block):
            at = first + tl.arange(0, block)
            x = tl.load(row + at, mask=at < vocab, other=-float("inf"))
            tl.store(row + at, fill + tl.zeros([block], tl.float32), mask=(at < vocab) & (_ordered(x) < lowest))


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """Integers in the order of float32 numbers."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
