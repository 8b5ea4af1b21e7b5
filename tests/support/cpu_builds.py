"""The CPU kernels for every way that a CPU can take, and how near results must be."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from pliant.kernels.c_compiler import THIS_MACHINE

BUILDS = {"this machine": THIS_MACHINE}
"""By name: the compiler's options."""
if platform.machine() == "x86_64":
    BUILDS["without AMX"] = (*THIS_MACHINE, "-mno-amx-tile", "-mno-amx-bf16")
    BUILDS["AVX2"] = ("-march=x86-64-v3",)
    BUILDS["any x86-64"] = ("-march=x86-64",)


def close(ours: Tensor, expected: Tensor) -> None:
    """Within rounding of the dtype, in units of the largest value."""
    assert ours.dtype == expected.dtype
    assert ours.shape == expected.shape
    largest = float(expected.abs().max())
    tolerance = 1e-5 if ours.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(ours.float(), expected.float(), rtol=0, atol=tolerance * largest)
