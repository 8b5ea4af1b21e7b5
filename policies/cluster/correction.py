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
_ALIKE = 1.25
"""Rates that are not farther apart count as one."""
_LITTLE = 0.02
"""Of the requests: what came at a rate that fewer came at is left out."""
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
        self._asked: list[tuple[float, float]] = []
        """Of how many of these requests so many came per second, the latest last."""

    @property
    def measured(self) -> float | None:
        """The share of the last requests that was answered in time; None of too few."""
        total = self._met + self._refused
        return self._met / total if total >= _FEWEST else None

    def observe(
        self, met: int, refused: int, rate: float, seconds: float, foreseen: Callable[[float], float] | None
    ) -> None:
        """Of `rate` requests per second in the last `seconds` so many were answered in time, and so many refused or
        late.

        `foreseen(rate)` is the share that the curve has in time of so many, with the replicas that served all the time;
        None if they were not the same: then what was measured is of no use.
        """
        self.value = 1 + (self.value - 1) * 0.5 ** (seconds / _FORGOTTEN_S)
        if foreseen is None:
            self._met = self._refused = 0.0
            self._asked = []
            return
        self._met = self._met * _KEPT + met
        self._refused = self._refused * _KEPT + refused
        self._note(met + refused, rate)

        def at(factor: float) -> float:
            total = sum(ended for ended, _ in self._asked)
            return sum(ended * foreseen(factor * asked) for ended, asked in self._asked) / total

        if (measured := self.measured) is None or abs(at(self.value) - measured) <= _UNNOTICED:
            return
        self.value *= (_where(at, measured) / self.value) ** _GAIN

    def _note(self, ended: int, rate: float) -> None:
        """So many requests, which came at this rate; those that came at nearly the same one are put together."""
        kept = [(_KEPT * count, asked) for count, asked in self._asked]
        least = _LITTLE * (ended + sum(count for count, _ in kept))
        kept = [each for each in kept if each[0] >= least]
        if kept and kept[-1][1] / _ALIKE <= rate <= kept[-1][1] * _ALIKE:
            count, asked = kept.pop()
            kept.append((count + ended, (count * asked + ended * rate) / (count + ended)))
        elif ended:
            kept.append((ended, rate))
        self._asked = kept


def _where(foreseen: Callable[[float], float], measured: float) -> float:
    """The greatest factor at which no less is foreseen than was measured; `foreseen` falls."""
    if foreseen(1.0) < measured:
        return 1.0
    low, high = 0.0, math.log(MOST)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if foreseen(math.exp(middle)) < measured else (middle, high)
    return math.exp(high)
