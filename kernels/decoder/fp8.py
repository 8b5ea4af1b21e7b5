"""Weights, keys and values as float8_e4m3fn: half of bfloat16's bytes, on GPUs that convert it themselves.

A number is a sign, a power of two and three more bits; a weight's is multiplied by a scale of its output (W8A16). Keys
and values have no scale: they are made of what a norm has bounded, and what is beyond the largest number, 448, is cut
off there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pliant.errors import PliantError
from pliant.kernels.decoder.quantized import Quantized, greatest, in_parts

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
_CAPABILITY = 8, 9


class OldGpuError(PliantError):
    """A GPU that does not convert fp8 itself."""


def quantized(weight: Tensor) -> Quantized:
    """To within 1/16 of each weight, or 2**-10 of its output's scale if that is more; the largest stays what it is."""
    scale = greatest(weight) / LARGEST
    scale[scale == 0] = 1  # of an output that is always 0
    return in_parts(weight, scale, E4M3, lambda some, its: some / its)


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
