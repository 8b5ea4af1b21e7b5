"""Where adapters lie in an arena whose front belongs to slots: plain placement, and copies within it (Chameleon §4.1).

Every adapter is one run of values, its blob. Whoever fills the pool counts bytes: as long as what is kept for slots and
all blobs together are no more than the arena, every blob finds its place, because blobs slide together when no gap is
large enough.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pliant.errors import PliantError

ALIGNED = 64
"""Bytes: blobs begin at multiples of it, and take multiples of it."""
_PIECE = 1 << 18
"""Values that are copied at a time, through memory of their own, where a blob slides by less than that."""


class PoolError(PliantError):
    """A blob that has no place, or two that share one: a defect of whoever counts the bytes."""


class _Blob(NamedTuple):
    """The values begin, …, end - 1 of the arena."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class AdapterPool:
    """Blobs by key in `arena`, a flat tensor of a multiple of `ALIGNED` bytes, behind what `keep` reserves.

    Sizes and offsets count values of the arena's dtype. Every copy runs on the current stream, in the order of calls,
    so that work which was launched on it before reads what it was meant to read.
    """

    def __init__(self, arena: Tensor) -> None:
        self._unit = ALIGNED // arena.element_size()
        if arena.dim() != 1 or len(arena) % self._unit:
            raise ValueError(f"an arena is flat and a multiple of {ALIGNED} bytes, got {list(arena.shape)} values")
        self._arena = arena
        self._kept = 0
        self._blobs: dict[str, _Blob] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._blobs

    @property
    def used(self) -> int:
        """Values that all blobs take."""
        return sum(blob.size for blob in self._blobs.values())

    def offset(self, key: str) -> int:
        """Where the blob of `key` begins, until the next `keep` or `place`. Raises KeyError if there is none."""
        return self._blobs[key].begin

    def keep(self, values: int) -> None:
        """From now on the first `values` belong to slots: what lies there moves behind them.

        Raises PoolError, and moves nothing, if they and the blobs are more than the arena.
        """
        kept = self._aligned(values)
        self._check_room(kept, 0)
        self._kept = kept
        in_the_way = [key for key, blob in self._blobs.items() if blob.begin < kept]
        for key in sorted(in_the_way, key=self.offset, reverse=True):
            self._move(key, self._room(self._blobs[key].size))

    @torch.inference_mode()
    def place(self, key: str, blob: Tensor) -> None:
        """Copy `blob`, flat and of the arena's dtype, to a place of its own. Others may slide for it.

        It may be on the arena's device, or on the CPU; nobody waits for the copy of one that is pinned there.

        Raises PoolError, and changes nothing, if there is no room, or if `key` has a blob already.
        """
        if key in self:
            raise PoolError(f"adapter {key} lies in the pool already, at value {self.offset(key):,}")
        if blob.dim() != 1 or not len(blob) or blob.dtype != self._arena.dtype:
            raise ValueError(f"a blob is flat {self._arena.dtype}, got {blob.dtype} {list(blob.shape)}")
        size = self._aligned(len(blob))
        self._check_room(self._kept, size)
        begin = self._room(size)
        self._arena[begin : begin + len(blob)].copy_(blob, non_blocking=True)
        self._blobs[key] = _Blob(begin, begin + size)

    def remove(self, key: str) -> None:
        """Give back the place of `key`. Raises KeyError if it has none."""
        del self._blobs[key]

    def check(self) -> None:
        """Raise PoolError unless blobs are aligned and apart, behind what is kept and within the arena."""
        taken = [("slots", _Blob(0, self._kept)), *sorted(self._blobs.items(), key=lambda item: item[1])]
        taken.append(("the end", _Blob(len(self._arena), len(self._arena))))
        for (key, blob), (next_key, next_blob) in pairwise(taken):
            if blob.end > next_blob.begin or blob.begin % self._unit or blob.end % self._unit:
                raise PoolError(f"{key} takes values {blob.begin:,} to {blob.end:,}, {next_key} {next_blob.begin:,} on")

    def _aligned(self, values: int) -> int:
        return -(-values // self._unit) * self._unit

    def _check_room(self, kept: int, more: int) -> None:
        used = self.used
        if kept + used + more > len(self._arena):
            raise PoolError(
                f"{kept:,} values for slots, {used:,} of adapters and {more:,} of another are more than the arena's "
                f"{len(self._arena):,}: adapters must be removed first"
            )

    def _room(self, size: int) -> int:
        """Where `size` values are free: the end of the smallest such gap. Blobs slide to the end until there is one.

        There must be as many in all, behind what is kept and beside the blobs that lie there.
        """
        keys = sorted((key for key, blob in self._blobs.items() if blob.begin >= self._kept), key=self.offset)
        borders = [self._kept, *(border for key in keys for border in self._blobs[key]), len(self._arena)]
        gaps = [_Blob(*gap) for gap in zip(borders[::2], borders[1::2], strict=True)]
        if fitting := [gap for gap in gaps if gap.size >= size]:
            return min(fitting, key=lambda gap: gap.size).end - size
        end = len(self._arena)
        for key, gap in zip(reversed(keys), reversed(gaps[:-1]), strict=True):
            end -= self._blobs[key].size
            self._move(key, end)
            if end - gap.begin >= size:
                break
        return end - size

    @torch.inference_mode()
    def _move(self, key: str, begin: int) -> None:
        """Bring a blob to where it begins at `begin`, which is no less than where it does; the two may overlap.

        It is copied from its end, in pieces no longer than the way, or through memory of their own: a piece that
        overlaps its target cannot be copied at once.
        """
        blob = self._blobs[key]
        way = begin - blob.begin
        if not way:
            return
        step = max(way, _PIECE)
        for end in range(blob.end, blob.begin, -step):
            piece = self._arena[max(blob.begin, end - step) : end]
            self._arena[end + way - len(piece) : end + way] = piece if len(piece) <= way else piece.clone()
        self._blobs[key] = _Blob(begin, begin + blob.size)
