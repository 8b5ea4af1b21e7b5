"""What it is worth to keep something in memory that nobody uses: adapters, and prefixes of prompts.

Chameleon (§4.1) scores adapters by F * frequency + R * recency + S * size, each relative to the most of any:
`compound`, and its special cases. Size stands there for what loading an adapter again would cost. Such a sum cannot
compare an adapter with a page of a prefix, which is small and cheap and, byte for byte, may still save more. `joint` is
what it estimates: the seconds that a byte saves in each second that it stays,

    rate * cost / bytes,    rate = (uses per second of late + 1 / (age + PATIENCE_S)) / 2

with the cost of bringing a thing back: seconds of loading, or of computing. How often it will be used is taken to lie
in the middle between how often it was, which is right for adapters that many share, and what its age since the last use
says, which is right for conversations: of their prefixes, and of the adapters that only they use. A prefix is worth
nothing while its adapter is out (FASTLIBRA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

Eviction = Literal["joint", "compound", "fair_share", "lru", "lfu", "none"]
"""By which what is idle is compared; with "none" nothing is kept, and recency decides what goes first."""

PATIENCE_S = 5.0
"""An age that hardly counts: uses of one burst lie that close together."""

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
    per_s: float
    """Uses in a second, of late."""


def scorer(by: Eviction, everything: Iterable[Use], now: float) -> Callable[[Use], float]:
    """Gives each use its score, the least valuable the lowest. Sums are relative to the most of `everything`."""
    if by == "joint":
        return lambda use: (use.per_s + 1 / (now - use.last_used + PATIENCE_S)) / 2 * use.cost / use.bytes
    weight_f, weight_r, weight_s = WEIGHTS[by]
    frequency = age = cost = 0.0
    for use in everything:
        frequency = max(frequency, use.frequency)
        age = max(age, now - use.last_used)
        cost = max(cost, use.cost)
    per_use, per_second, per_cost = weight_f / (frequency or 1), weight_r / (age or 1.0), weight_s / (cost or 1.0)
    return lambda use: per_use * use.frequency + (weight_r - per_second * (now - use.last_used)) + per_cost * use.cost
