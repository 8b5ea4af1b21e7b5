"""Weights, keys and values as float8_e4m3fn: half of bfloat16's bytes, on GPUs that convert it themselves.

A number is a sign, a power of two and three more bits; a weight's is multiplied by a scale of its output (W8A16). Keys
and values have no scale: they are made of what a norm has bounded, and what is beyond the largest number, 448, is cut
off there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pliant.errors import PliantError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_CAPABILITY = 8, 9
_ROWS = 1024
"""Outputs that are quantized at a time, so that little of a weight is ever there in float32."""


class OldGpuError(PliantError):
    """A GPU that does not convert fp8 itself."""


class Fp8(NamedTuple):
    """A weight [out, in], about `values` times `scale`."""

    values: Tensor
    """float8_e4m3fn [out, in]."""
    scale: Tensor
    """float32 [out]."""


def quantized(weight: Tensor) -> Fp8:
    """To within 1/16 of each weight, or 2**-10 of its output's scale if that is more; the largest stays what it is."""
    scale = torch.maximum(weight.amax(1), -weight.amin(1)).float() / LARGEST
    scale[scale == 0] = 1  # of an output that is always 0
    values = torch.empty_like(weight, dtype=E4M3)
    for first in range(0, len(weight), _ROWS):
        rows = slice(first, first + _ROWS)
        values[rows] = weight[rows].float() / scale[rows, None]
    return Fp8(values, scale)


def stored_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is stored of keys or values `x`."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3) if dtype is E4M3 else x.to(dtype)


def check(device: torch.device) -> None:
    """Raise OldGpuError if that GPU is too old."""
    if (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        raise OldGpuError(
            f"quantize: fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell); "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: leave quantize out"
        )
