"""Weights and, on CPUs, activations as int8 (W8A8), each output and each token with a scale of its own.

A decode step reads a quarter or half of the bytes, and a CPU multiplies four times as many whole numbers at a time as
it does float32. Scales of activations are found as they come, so a token's answer does not depend on its batch. GPUs
widen weights on their way to the product (W8A16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pliant.kernels.decoder.quantized import Quantized, greatest, in_parts

_LARGEST = 127
_LEAST_SCALE = 1e-30


def quantized(rows: Tensor) -> Quantized:
    """The nearest of the 255 multiples of each row's scale, whose largest is the row's largest value.

    cpu_int8.c does the same, to the bit. The scale of a row with a value that is not finite is not finite either.
    """
    scale = greatest(rows) / _LARGEST
    scale[scale < _LEAST_SCALE] = 1  # of a row that is always 0, or as good as that
    return in_parts(rows, scale, torch.int8, lambda some, its: (some * (1 / its)).round())
