"""What it is worth to keep something in memory that nobody uses: adapters, and prefixes of prompts.

Chameleon (§4.1) scores adapters by F * frequency + R * recency + S * size, each relative to the most of any:
`compound`, and its special cases. Size stands there for what loading an adapter again would cost. Such a sum cannot
compare an adapter with a page of a prefix, which is small and cheap and, byte for byte, may still save more. `joint` is
what it estimates: the seconds that a byte saves in each second that it stays,

    rate * cost / bytes

with the rate at which a thing is likely to be used again, and the cost of bringing it back: seconds of loading, or of
computing. An adapter is used as often as it was of late. Most prefixes are of one conversation, and how long that has
been silent says more than how many turns it had: how soon prefixes are used again that were used as often and have been
idle as long is learned (`Reuse`). A prefix is worth nothing while its adapter is out (FASTLIBRA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Eviction = Literal["joint", "compound", "fair_share", "lru", "lfu", "none"]
"""By which what is idle is compared; with "none" nothing is kept, and recency decides what goes first."""

WEIGHTS: dict[Eviction, tuple[float, float, float]] = {
    "compound": (0.45, 0.10, 0.45),
    "fair_share": (1 / 3, 1 / 3, 1 / 3),
    "lru": (0.0, 1.0, 0.0),
    "lfu": (1.0, 0.0, 0.0),
    "none": (0.0, 1.0, 0.0),
}
"""F, R and S of the sums: how much frequency, recency and cost count."""


class Use(NamedTuple):
    """What is known of a thing in memory."""

    frequency: float
    """Uses of late."""
    last_used: float
    cost: float
    """Of bringing it back, in any unit that is the same for all that are compared."""
    bytes: float
    """Memory that it takes, in any unit likewise."""
    rate: float
    """Uses in a second, as predicted for now."""


def scorer(by: Eviction, everything: Iterable[Use], now: float) -> Callable[[Use], float]:
    """Gives each use its score, the least valuable the lowest. Sums are relative to the most of `everything`."""
    if by == "joint":
        return lambda use: use.rate * use.cost / use.bytes
    weight_f, weight_r, weight_s = WEIGHTS[by]
    frequency = age = cost = 0.0
    for use in everything:
        frequency = max(frequency, use.frequency)
        age = max(age, now - use.last_used)
        cost = max(cost, use.cost)
    per_use, per_second, per_cost = weight_f / (frequency or 1), weight_r / (age or 1.0), weight_s / (cost or 1.0)
    return lambda use: per_use * use.frequency + (weight_r - per_second * (now - use.last_used)) + per_cost * use.cost


class Reuse:
    """How often what is idle is used again, by how often it was used and how long it has been idle; it learns.

    Both fall into classes that double in width. As long as little is known of one, `0.5 / (age + 30 s)` is assumed.
    """

    def __init__(self) -> None:
        self._uses = [[0.0] * _AGES for _ in range(_FREQUENCIES)]
        self._seconds = [[0.0] * _AGES for _ in range(_FREQUENCIES)]

    def rate(self, frequency: float, age: float) -> float:
        """Uses in a second of a thing that was used so often of late, and has been idle for `age` seconds."""
        row, _ = _classes(frequency, age)
        place = min(math.log2(age + 1.0) - 0.5, _AGES - 1.0)
        low = max(0, int(place))
        high = min(low + 1, _AGES - 1)
        share = max(0.0, place - low)
        return (1.0 - share) * self._of_class(row, low) + share * self._of_class(row, high)

    def _of_class(self, row: int, column: int) -> float:
        """As it is in the middle of an age's class; ages between two middles lie between their rates."""
        assumed = 0.5 / (math.pow(2.0, column + 0.5) + 29.0)
        return (self._uses[row][column] + _ASSUMED_S * assumed) / (self._seconds[row][column] + _ASSUMED_S)

    def observe(self, frequency: float, age: float, used: bool) -> None:
        """A thing was idle for `age` seconds; then it was used again, or evicted."""
        row, column = _classes(frequency, age)
        seconds = self._seconds[row]
        for earlier in range(column):
            seconds[earlier] += math.pow(2.0, earlier)
        seconds[column] += age + 1.0 - math.pow(2.0, column)
        self._uses[row][column] += used


_FREQUENCIES, _AGES = 5, 13
_ASSUMED_S = 100.0


def _classes(frequency: float, age: float) -> tuple[int, int]:
    row = min(max(int(math.log2(frequency + 0.5)), 0), _FREQUENCIES - 1)
    return row, min(int(math.log2(age + 1.0)), _AGES - 1)
