"""How much of a GPU's memory a process may take, which may share it with others."""

from __future__ import annotations

import torch


def take_share(gpus: float) -> None:
    """Bound what this process allocates to the share of a GPU that it reserved; 0 and whole ones bound nothing."""
    if 0 < gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate: as much as is free, within its share."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free, whole = torch.cuda.mem_get_info(index)
    share = int(torch.cuda.get_per_process_memory_fraction(index) * whole)
    return max(0, min(free, share - torch.cuda.memory_reserved(index)))
