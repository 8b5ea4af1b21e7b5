"""Adapters in the host's memory, between disk and device: read and converted once, as they are installed."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pliant.formats.adapter_info import AdapterRef

if TYPE_CHECKING:
    from torch import Tensor


class HostTier:
    """Blobs in `total` bytes; where these do not suffice, those go that were asked for the longest ago.

    For one thread. Nobody writes to blobs.
    """

    def __init__(self, total: int = 0) -> None:
        self._total = total
        self._blobs: OrderedDict[AdapterRef, Tensor] = OrderedDict()
        """The latest last."""
        self.bytes = 0
        self.hits = 0
        """Loads that needed no disk."""

    def __contains__(self, ref: AdapterRef) -> bool:
        return ref in self._blobs

    def get(self, ref: AdapterRef) -> Tensor | None:
        """The blob of `ref`, if it is here, for a load."""
        if ref not in self._blobs:
            return None
        self.hits += 1
        self._blobs.move_to_end(ref)
        return self._blobs[ref]

    def keep(self, ref: AdapterRef, blob: Tensor) -> None:
        """It was read. What is larger than all there is is not kept."""
        if blob.nbytes > self._total:
            return
        if ref not in self._blobs:
            self.bytes += blob.nbytes
        self._blobs[ref] = blob
        self._blobs.move_to_end(ref)
        while self.bytes > self._total:
            self.bytes -= self._blobs.popitem(last=False)[1].nbytes
