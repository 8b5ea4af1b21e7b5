"""Weights and, on CPUs, activations as int8 (W8A8), each output and each token with a scale of its own.

A decode step reads a quarter or half of the bytes, and a CPU multiplies four times as many whole numbers at a time as
it does float32. Scales of activations are found as they come, so a token's answer does not depend on its batch. GPUs
widen weights on their way to the product (W8A16).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, int8

_LARGEST = 127
_LEAST_SCALE = 1e-30


class Int8(NamedTuple):
    """Rows [n, m], about `values` times `scale`: one row for an output of a weight, or for a token."""

    values: Tensor
    """int8 [n, m]."""
    scale: Tensor
    """float32 [n]."""


def quantized(rows: Tensor) -> Int8:
    """The nearest of the 255 multiples of each row's scale, whose largest is the row's largest value.

    cpu_int8.c does the same, to the bit. The scale of a row with a value that is not finite is not finite either.
    """
    wide = rows.float()
    scale = wide.abs().amax(dim=1) / _LARGEST
    scale[scale < _LEAST_SCALE] = 1  # of a row that is always 0, or as good as that
    return Int8((wide * (1 / scale)[:, None]).round().to(int8), scale)
