"""Whether there is a GPU, and how much memory a process may take that computes on it: of the GPU's, which others may
share, and pinned."""

from __future__ import annotations

import torch

from pliant.errors import PliantError

_GIVEN_BACK = "pinned_max_cached_size_mb"


def must_be_there() -> None:
    """Raises PliantError if torch finds no GPU."""
    if not torch.cuda.is_available():
        raise PliantError(
            f"gpus: torch {torch.__version__} finds no GPU here; install its build for this machine's CUDA driver "
            "(pliant doctor tells which), or leave gpus out"
        )


def take_share(gpus: float) -> None:
    """Bound what this process allocates to the share of a GPU that it reserved; 0 and whole ones bound nothing. Raises
    PliantError if it reserved any and torch finds none."""
    if gpus:
        must_be_there()
    if 0 < gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate: as much as is free, within its share."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free, whole = torch.cuda.mem_get_info(index)
    share = int(torch.cuda.get_per_process_memory_fraction(index) * whole)
    return max(0, min(free, share - torch.cuda.memory_reserved(index)))


def pin_exactly() -> None:
    """Have large pieces of pinned memory take what was asked for, until they are freed.

    torch else rounds them up to powers of two, and keeps them. What the operator has told it stays
    (PYTORCH_ALLOC_CONF).
    """
    told = torch._C._accelerator_getAllocatorSettings()
    if _GIVEN_BACK not in told:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (told, f"{_GIVEN_BACK}:1"))))
