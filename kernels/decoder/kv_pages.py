"""The memory for keys and values: pages of `PAGE` tokens, allocated once, at most for `slots` texts of `max_length`.

A request has pages for the tokens that it has stored, in any order, and tables say which (Flover §V-D, whose slots were
whole), so that there may be fewer than all slots could fill. Nothing is allocated while requests come and go, and
whether it all fits is plain arithmetic, done before anything is allocated and told in full when the answer is no.

All of it is one flat tensor, the arena, in which each page is one run of values. Page 0 belongs to nobody: what pads a
batch is stored there. What lies behind the pages that are in use serves adapters (`adapter_pool`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pliant.errors import PliantError
from pliant.kernels import gpu_memory, huge_pages, memory
from pliant.kernels.decoder.adapter_pool import ALIGNED
from pliant.kernels.decoder.kernels import DecoderKernels
from pliant.models.decoder_shape import DecoderShape

PAGE = 64
"""Tokens of a page, as measured on a CPU: with 16, attention of a decode step takes up to a third longer."""
MOST_SLOTS = 32
"""Slots where nobody says how many."""
_TEXTS = 4
"""So many texts of the greatest length fit at once, where nobody says how long that is."""
_LEAST = 128
"""Tokens below which a text is refused rather than offered, where nobody says how long."""


class KVMemoryError(PliantError):
    """Texts that do not fit into the memory they may take; the message says by how much, and what would fit."""


def pages_of(tokens: int) -> int:
    """Pages that so many tokens of a text take."""
    return -(-tokens // PAGE)


def page_bytes(shape: DecoderShape, dtype: torch.dtype) -> int:
    """What a page takes."""
    return shape.kv_bytes(PAGE, dtype.itemsize)


def bytes_needed(shape: DecoderShape, slots: int, max_length: int, dtype: torch.dtype) -> int:
    """What `slots` texts of `max_length` tokens take, in bytes, with the page that belongs to nobody."""
    return (slots * pages_of(max_length) + 1) * page_bytes(shape, dtype)


def length_that_fits(shape: DecoderShape, texts: int, dtype: torch.dtype, budget_bytes: int) -> int:
    """The most tokens that each of `texts` texts can have in `budget_bytes`; may be 0."""
    return max(0, budget_bytes // page_bytes(shape, dtype) - 1) // texts * PAGE


def allowed_bytes(device: torch.device, budget_bytes: int | None, reserved: int = 0) -> int:
    """What keys and values may take: `budget_bytes`, if so much is free beside `reserved` bytes that others will take.

    None stands for nine tenths of what this process may take on a GPU, and for half of what is free in a machine, which
    has other tenants.
    """
    on_gpu = device.type == "cuda"
    free = max(0, (gpu_memory.free_bytes(device) if on_gpu else memory.free_bytes()) - reserved)
    if budget_bytes is None:
        return free * 9 // 10 if on_gpu else free // 2
    return min(budget_bytes, free)


def fit(
    shape: DecoderShape, slots: int | None, max_length: int | None, dtype: torch.dtype, budget_bytes: int
) -> tuple[int, int]:
    """Slots and max_length for `budget_bytes`; what is None is chosen, what is given is kept or refused.

    Slots are 32, and max_length is the model's own, or else what four texts can have at once. Raises KVMemoryError with
    the arithmetic if not even one text fits, and ValueError for a max_length that the model has no positions for.
    """
    if max_length is not None and not 1 <= max_length <= shape.max_length:
        raise ValueError(f"max_length must be 1 to {shape.max_length:,}, the model's own, got {max_length:,} tokens")
    if slots is not None and slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
    if max_length is None:
        longest = length_that_fits(shape, min(_TEXTS, slots or MOST_SLOTS), dtype, budget_bytes)
        max_length = min(shape.max_length, max(longest, _LEAST))
    _check(shape, max_length, dtype, budget_bytes)
    return slots or MOST_SLOTS, max_length


def _check(shape: DecoderShape, max_length: int, dtype: torch.dtype, budget_bytes: int) -> None:
    needed = bytes_needed(shape, 1, max_length, dtype)
    if needed <= budget_bytes:
        return
    token = shape.kv_bytes(1, dtype.itemsize)
    shorter = length_that_fits(shape, 1, dtype, budget_bytes)
    remedy = f"max_length {shorter:,}, or more memory_mb" if shorter else f"memory_mb {-(-needed // 2**20):,}"
    raise KVMemoryError(
        f"keys and values do not fit: a text of {pages_of(max_length) * PAGE:,} tokens x {_size(token)}, with a page "
        f"for what pads batches = {_size(needed)}, but {_size(budget_bytes)} are allowed (memory_mb, or what is free): "
        f"use {remedy}"
    )


def _size(count: float) -> str:
    """A number of bytes for a person."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    digits = 0 if unit == "bytes" or (unit == "KiB" and count == round(count)) else 1
    return f"{count:,.{digits}f} {unit}"


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(huge_pages.zeros([count * dtype.itemsize], np.uint8)).view(dtype)


class KVPages:
    """`arena`, flat and zero at first, begins with [pages, layers, 2, kv_heads, PAGE, head_dim]: keys, values.

    `keys` and `values` are views of it, [layers, pages, kv_heads, PAGE, head_dim] each; a head's tokens are contiguous,
    and pages lie `page_bytes` bytes apart, `page_values` values of the arena. These are of `dtype`, as adapters are;
    keys and values may be `stored` in another one. There are as many pages as the arena holds. It takes `arena_bytes`,
    or what `slots` texts of `max_length` tokens need where that is more and allowed, rounded up to whole units of
    `ALIGNED` bytes.

    Raises KVMemoryError if `arena_bytes`, or one text, is more than `budget_bytes`, or than is free.
    """

    def __init__(
        self,
        shape: DecoderShape,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: DecoderKernels,
        budget_bytes: int | None = None,
        arena_bytes: int | None = None,
        stored: torch.dtype | None = None,
    ) -> None:
        stored = stored or dtype
        allowed = allowed_bytes(device, budget_bytes)
        _check(shape, max_length, stored, allowed)
        self.page_bytes = page_bytes(shape, stored)
        affordable = allowed // self.page_bytes * self.page_bytes
        wanted = max(min(bytes_needed(shape, slots, max_length, stored), affordable), arena_bytes or 0)
        if wanted > allowed:
            raise KVMemoryError(
                f"keys, values and adapters do not fit: they shall share {_size(wanted)}, but {_size(allowed)} are "
                "allowed (memory_mb, or what is free): use less memory_mb"
            )
        self.slots = slots
        self.max_length = max_length
        self.page_values = self.page_bytes // dtype.itemsize
        self.arena = _zeros(-(-wanted // ALIGNED) * ALIGNED // dtype.itemsize, dtype, device)
        self.pages = len(self.arena) // self.page_values
        size = (self.pages, shape.layers, 2, shape.kv_heads, PAGE, shape.head_dim)
        self.keys, self.values = (
            self.arena[: self.pages * self.page_values].view(stored).view(size).transpose(0, 1).unbind(2)
        )
        self._kernels = kernels

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, [pages, kv_heads, PAGE, head_dim] each."""
        return self.keys[index], self.values[index]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target), in every layer. No page is both, nor the target of two moves."""
        if moves:
            self._kernels.move(self.keys, self.values, [(source, target, PAGE) for source, target in moves])
