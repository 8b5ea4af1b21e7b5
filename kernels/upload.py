"""Copies from the CPU to a device that no CPU thread waits for."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32], device: torch.device) -> Tensor:
    """`array` as a tensor on `device`; on a GPU, work that was launched before is not waited for."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
