"""Service time as a function of length: what one runtime takes for a text, as measured and as observed since.

A runtime is measured once, at a few lengths: one that pads every text at its max_length only. From then on each answer
tells how much longer or shorter the machine takes by now. The median of recent ratios corrects the curve near the
lengths that they were observed at, within bounds; where few were observed, the median over all lengths does. As
observations age they are forgotten, and what was measured holds again: a wrong estimate that keeps requests away cannot
last.

All seconds are on a grid, and small corrections count as none, so that equal replicas report equal curves.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_GRID = math.log(1.1)
_ROUNDING = 1e-6
"""By which a time that is on the grid may be off it, in steps."""
_FACTORS = math.log(1.25)
"""The step between corrections."""
_MOST_STEPS = 6
"""A correction is at most about fourfold."""
_REMEMBERED_S = 30.0
_REMEMBERED = 32
"""Observations near each length."""
_DOUBT = 4
"""So many observations without a deviation are assumed, which outvote fewer odd ones."""
_SHORTEST = 16


def lengths_to_measure(max_length: int, dynamic: bool) -> tuple[int, ...]:
    """Where to measure a runtime of `max_length` tokens: doubling ones, or only the last if it pads all texts to it."""
    lengths = [max_length]
    while dynamic and lengths[-1] > _SHORTEST:
        lengths.append(-(-lengths[-1] // 2))
    return tuple(reversed(lengths))


class Tables(NamedTuple):
    """Seconds by length, from 0."""

    expected: NDArray[np.float64]
    """That a text takes alone."""
    idle: NDArray[np.float64]
    """Those by which an idle replica admits."""
    work: NDArray[np.float64]
    """By which it holds up those behind it."""


@dataclass(frozen=True)
class ServiceCurve:
    """Seconds that a text takes on one runtime, by its length in tokens.

    A point is a length, the seconds expected there now, and those measured there when the runtime was loaded. Lengths
    rise, and seconds do not fall; in between they are interpolated, and a text that is shorter than the first point
    takes as long as that. Where texts that wait are computed together, each holds up those behind it for less than it
    takes alone: `shares` say at each point for which share of that, above 0 and at most 1. Raises ValueError for other
    points or shares.
    """

    points: tuple[tuple[int, float, float], ...]
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ordered = all(
            left[0] < right[0] and left[1] <= right[1] and left[2] <= right[2] for left, right in pairwise(self.points)
        )
        if not (self.points and ordered and all(0 < number < math.inf for number in chain(*self.points))):
            raise ValueError(f"lengths and seconds must be positive and rise, got {self.points}")
        if self.shares and not (len(self.shares) == len(self.points) and all(0 < each <= 1 for each in self.shares)):
            raise ValueError(f"there must be a share of at most 1 for each of {len(self.points)} points")

    @classmethod
    def constant(cls, seconds: float) -> ServiceCurve:
        """Of a runtime that takes `seconds` for every text."""
        return cls(((1, seconds, seconds),))

    @classmethod
    def of_set(cls, curves: Mapping[int, ServiceCurve]) -> ServiceCurve:
        """Of runtimes by max_length, of which each text has the shortest that it fits into.

        A shorter text is never taken to need longer than a longer one. Raises ValueError without runtimes.
        """
        if len(curves) == 1:
            return next(iter(curves.values()))
        points: list[tuple[int, float, float]] = []
        shares: list[float] = []
        before = 0
        for max_length, curve in sorted(curves.items()):
            inside = (length for length, *_ in curve.points if before < length < max_length)
            for length in sorted({before + 1, *inside, max_length}):
                points.append((length, curve.seconds(length), _between(length, *curve._measured)))
                shares.append(_between(length, *curve._held_up))
            before = max_length
        lengths, expected, measured = zip(*points, strict=True)
        return cls(tuple(zip(lengths, _rising(expected), _rising(measured), strict=True)), tuple(shares))

    def seconds(self, length: int) -> float:
        """Expected for a text of `length` tokens."""
        return _between(length, *self._expected)

    def work_seconds(self, length: int) -> float:
        """By which a text of `length` tokens is expected to hold up those behind it."""
        return self.seconds(length) * _between(length, *self._held_up)

    def idle_seconds(self, length: int) -> float:
        """As measured, or as expected if that is less: by this an idle replica admits (see `admission`)."""
        return _between(length, *self._idle)

    def tables(self, longest: int) -> Tables:
        """`seconds`, `idle_seconds` and `work_seconds` of each length from 0 to `longest`."""
        lengths = np.arange(longest + 1)
        expected = np.interp(lengths, *self._expected)
        return Tables(expected, np.interp(lengths, *self._idle), expected * np.interp(lengths, *self._held_up))

    @cached_property
    def _expected(self) -> tuple[list[int], list[float]]:
        return [point[0] for point in self.points], [point[1] for point in self.points]

    @cached_property
    def _measured(self) -> tuple[list[int], list[float]]:
        return [point[0] for point in self.points], [point[2] for point in self.points]

    @cached_property
    def _held_up(self) -> tuple[list[int], list[float]]:
        lengths = [point[0] for point in self.points]
        return lengths, list(self.shares) or [1.0] * len(lengths)

    @cached_property
    def _idle(self) -> tuple[list[int], list[float]]:
        return [point[0] for point in self.points], [min(point[1:]) for point in self.points]


class _Observation(NamedTuple):
    now: float
    ratio: float
    """Of the seconds observed to those measured."""


class ServiceTimes:
    """The service times of one runtime, measured at some lengths in tokens and then observed.

    A shorter text never takes longer than a longer one: measurements that say so are noise. `now` is in seconds, on any
    clock that does not go back. `shares` are those of a `ServiceCurve`, by the same lengths. Raises ValueError without
    measurements, and for lengths or seconds that are not positive.
    """

    def __init__(self, measured: Mapping[int, float], shares: Mapping[int, float] | None = None) -> None:
        self._lengths = sorted(measured)
        self._shares = tuple(shares[length] for length in self._lengths) if shares else ()
        self._measured = _rising(measured[length] for length in self._lengths)
        self._observed = [deque[_Observation](maxlen=_REMEMBERED) for _ in self._lengths]
        """By measured length: those nearest to it."""
        self.curve(0.0)

    def observe(self, now: float, length: int, seconds: float) -> None:
        """A text of `length` tokens took `seconds`; what else was computed for it, such as importance, left out."""
        ratio = seconds / _between(length, self._lengths, self._measured)
        if length < self._lengths[0] and len(self._lengths) > 1 and ratio < 1.0:
            return  # it is faster as it is shorter than what was measured, which says nothing of longer ones
        self._observed[self._nearest(length)].append(_Observation(now, ratio))

    def curve(self, now: float) -> ServiceCurve:
        """What to expect."""
        recent = [[ratio for then, ratio in observed if now - then <= _REMEMBERED_S] for observed in self._observed]
        overall = statistics.median([*chain(*recent), *[1.0] * _DOUBT])
        factors = [_on_grid(statistics.median([*ratios, *[overall] * _DOUBT])) for ratios in recent]
        expected = _rising(seconds * factor for seconds, factor in zip(self._measured, factors, strict=True))
        points = zip(self._lengths, map(_rounded_up, expected), map(_rounded_up, self._measured), strict=True)
        return ServiceCurve(tuple(points), self._shares)

    def _nearest(self, length: int) -> int:
        above = min(bisect_left(self._lengths, length), len(self._lengths) - 1)
        below = max(above - 1, 0)
        return min(above, below, key=lambda index: abs(self._lengths[index] - length))


def _between(length: float, lengths: Sequence[int], values: Sequence[float]) -> float:
    """As np.interp has it, which takes ten times as long for one number."""
    above = bisect_right(lengths, length)
    if not above:
        return values[0]
    if above == len(lengths):
        return values[-1]
    left, right = lengths[above - 1], lengths[above]
    slope = (values[above] - values[above - 1]) / (right - left)
    return slope * (length - left) + values[above - 1]


def _rising(seconds: Iterable[float]) -> list[float]:
    """`seconds`, each lowered to the least that follows."""
    return list(accumulate(reversed(list(seconds)), min))[::-1]


def _on_grid(factor: float) -> float:
    """The nearest correction that is made."""
    steps = round(math.log(max(factor, 1e-9)) / _FACTORS)
    return math.exp(min(_MOST_STEPS, max(-_MOST_STEPS, steps)) * _FACTORS)


def _rounded_up(seconds: float) -> float:
    return math.exp(math.ceil(math.log(seconds) / _GRID - _ROUNDING) * _GRID)
