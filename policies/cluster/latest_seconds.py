"""How many requests came in each of the latest seconds, as several gateways tell it, each a second's part at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_KEPT = 60


class LatestSeconds:
    """Seconds are counted since 1970 by the gateways' clocks."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, counts: Mapping[int, int]) -> None:
        """Requests by second."""
        self._counts.update(counts)
        if len(self._counts) > _KEPT:
            since = max(self._counts) - _KEPT
            self._counts = Counter({second: count for second, count in self._counts.items() if second > since})

    def over(self, number: int) -> NDArray[np.float64]:
        """The requests of each of the last `number` seconds that are over: the newest one that anybody has told of may
        not be."""
        newest = max(self._counts, default=0)
        return np.array([self._counts[newest - back] for back in range(number, 0, -1)], np.float64)
