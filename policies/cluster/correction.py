"""What a service's value curve lacks, learnt from more requests refused, or fewer, than it foresaw.

A curve is made of measured speeds, and may still promise too much: replicas share cores, hosts throttle, clients that
are refused come back at once. Then replicas are counted as if the demand were `value` times what it is, which moves the
curve to where its promise is what was measured. Nothing is learnt where nothing is refused and nothing was foreseen to
be, and what was learnt is forgotten slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MOST = 4.0
"""However much is refused."""
_UNNOTICED = 0.02
"""Difference between what is foreseen and what is measured that calls for nothing."""
_FEWEST = 30.0
"""Requests that say something."""
_KEPT = 0.6
"""Of the counts, from one observation to the next."""
_GAIN = 0.5
"""Of the way, in logarithms, to where measured and foreseen meet, that one observation goes."""
_FORGOTTEN_S = 1800.0
"""After which half of it is forgotten."""
_STEPS = 8
"""Of bisection."""


class Correction:
    """Of one service."""

    def __init__(self) -> None:
        self.value = 1.0
        """By how many times the demand the curve is to be asked, 1 to `MOST`."""
        self._met = self._refused = 0.0

    @property
    def measured(self) -> float | None:
        """The share of the last requests that was answered in time; None of too few."""
        total = self._met + self._refused
        return self._met / total if total >= _FEWEST else None

    def observe(self, met: int, refused: int, seconds: float, foreseen: Callable[[float], float] | None) -> None:
        """In the last `seconds` so many requests were answered in time, and so many refused or late.

        `foreseen(factor)` is the share that the curve has in time at `factor` times the demand of these seconds, with
        the replicas that served all the time; None if they were not the same: then what was measured is of no use.
        """
        self.value = 1 + (self.value - 1) * 0.5 ** (seconds / _FORGOTTEN_S)
        if foreseen is None:
            self._met = self._refused = 0.0
            return
        self._met = self._met * _KEPT + met
        self._refused = self._refused * _KEPT + refused
        if (measured := self.measured) is None or abs(foreseen(self.value) - measured) <= _UNNOTICED:
            return
        self.value *= (_where(foreseen, measured) / self.value) ** _GAIN


def _where(foreseen: Callable[[float], float], measured: float) -> float:
    """The greatest factor at which no less is foreseen than was measured; `foreseen` falls."""
    if foreseen(1.0) < measured:
        return 1.0
    low, high = 0.0, math.log(MOST)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if foreseen(math.exp(middle)) < measured else (middle, high)
    return math.exp(high)
