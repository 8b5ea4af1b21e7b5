"""How many requests came in each of the latest seconds, as several gateways tell it, each a second's part at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_KEPT = 60
_LATE_S = 2
"""Gateways tell every second, or a little later; who tells nothing for longer has nothing to tell."""


class LatestSeconds:
    """Seconds are counted since 1970 by the gateways' clocks; `now` is in seconds on the clock of whoever is told."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._newest = -1
        self._told = 0.0
        """When the newest second was first told of, if any was."""

    def add(self, counts: Mapping[int, int], now: float) -> None:
        """Requests by second."""
        newest = max(counts, default=self._newest)
        if newest > self._newest:
            self._newest, self._told = newest, now
        self._counts.update(counts)
        if len(self._counts) > _KEPT:
            since = self._newest - _KEPT
            self._counts = Counter({second: count for second, count in self._counts.items() if second > since})

    def over(self, number: int, now: float) -> NDArray[np.float64]:
        """The requests of each of the last `number` seconds that are over: the newest one that anybody has told of may
        not be."""
        latest = self._newest + max(0, int(now - self._told) - _LATE_S)
        return np.array([self._counts[latest - back] for back in range(number, 0, -1)], np.float64)
