"""Weights as int8 with a scale for each output (W8A16): a quarter or half of the bytes that a decode step reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, int8

_LARGEST = 127


class Int8(NamedTuple):
    """A weight [out, in], about `values` times `scale`."""

    values: Tensor
    """int8 [out, in]."""
    scale: Tensor
    """float32 [out]."""


def quantized(weight: Tensor) -> Int8:
    """The nearest of the 255 multiples of each output's scale, whose largest is the output's largest weight."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / _LARGEST
    scale[scale == 0] = 1  # of an output that is always 0
    return Int8((wide / scale[:, None]).round().to(int8), scale)
