"""Which pages of an executor are free: the lowest are given out first, so that adapters find room behind them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from pliant.policies.llm.decode_slots import SlotError


class FreePages:
    """Pages 1 to `count`; page 0 is never given out, so that whatever pads a batch may be stored there."""

    def __init__(self, count: int) -> None:
        self.count = self.limit = count
        """Pages that may be given out are no higher than the limit."""
        self._free = list(range(1, count + 1))

    @property
    def free(self) -> frozenset[int]:
        """All that nobody has, those above the limit too."""
        return frozenset(self._free)

    def take(self) -> int:
        """The lowest one. Raises SlotError if none is free: a defect of whoever counts the memory."""
        if not self._free or self._free[0] > self.limit:
            raise SlotError(f"all {self.limit} pages are taken")
        return heapq.heappop(self._free)

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)

    def resize(self, limit: int, taken: Sequence[int]) -> list[tuple[int, int]]:
        """Give out no page above `limit` from now on; the moves, (source, target), that free those of `taken` there."""
        self.limit = limit
        above = [page for page in taken if page > limit]
        moves = [(page, self.take()) for page in above]
        self.give_back(above)
        return moves
