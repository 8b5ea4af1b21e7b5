"""Rows of numbers as numbers of a byte each, with a scale for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_AT_ONCE = 1024
"""Rows that are quantized at a time, so that little of a weight is ever there in float32."""


class Quantized(NamedTuple):
    """Rows [n, m], about `values` times `scale`: one row for an output of a weight, or for a token."""

    values: Tensor
    """[n, m], of a byte each."""
    scale: Tensor
    """float32 [n]."""


def greatest(rows: Tensor) -> Tensor:
    """The greatest size in each row, float32 [n]."""
    return torch.maximum(rows.amax(1), -rows.amin(1)).float()


def in_parts(rows: Tensor, scale: Tensor, dtype: torch.dtype, narrow: Callable[[Tensor, Tensor], Tensor]) -> Quantized:
    """What `narrow` makes of some rows in float32 and their scales [n, 1], as `dtype`."""
    values = torch.empty_like(rows, dtype=dtype)
    for first in range(0, len(rows), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        values[some] = narrow(rows[some].float(), scale[some, None])
    return Quantized(values, scale)
