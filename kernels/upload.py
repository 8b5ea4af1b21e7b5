"""Copies from the CPU to a device that no CPU thread waits for."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 4
"""int32 numbers at multiples of which an array begins, as kernels that are compiled for aligned ones need it."""


def upload(array: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32], device: torch.device) -> Tensor:
    """`array` as a tensor on `device`; on a GPU, work that was launched before is not waited for."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def refill(tensor: Tensor, array: NDArray[np.int32] | NDArray[np.int64]) -> None:
    """Copy `array` to where graphs find it on a GPU; nobody waits."""
    tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)


def packed(arrays: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """`arrays` in one, so that a single copy uploads them."""
    flat = np.zeros(_begins(arrays)[-1], np.int32)
    for begin, array in zip(_begins(arrays), arrays, strict=False):
        flat[begin : begin + array.size] = array.ravel()
    return flat


def unpacked(flat: Tensor, like: Sequence[NDArray[np.int32]]) -> list[Tensor]:
    """Views of what was uploaded of `packed(like)`."""
    return [
        flat[begin : begin + array.size].view(array.shape) for begin, array in zip(_begins(like), like, strict=False)
    ]


def _begins(arrays: Sequence[NDArray[np.int32]]) -> list[int]:
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    return [0, *np.cumsum(sizes, dtype=int).tolist()]
