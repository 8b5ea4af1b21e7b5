"""Several runtimes in one replica: what it takes for a text, which runs on the shortest that the text fits into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pliant.policies.encoder.service_curve import ServiceCurve, Tables


@dataclass(frozen=True)
class ResidentTimes:
    """Seconds that a text takes, by its length: the `ServiceCurve`s of a replica's runtimes, by rising max_length.

    A runtime is never taken to be slower than a longer one: then the longer one is used. Raises ValueError when there
    is none, or lengths do not rise.
    """

    runtimes: tuple[tuple[int, ServiceCurve], ...]

    def __post_init__(self) -> None:
        lengths = [max_length for max_length, _ in self.runtimes]
        if not lengths or any(left >= right for left, right in pairwise([0, *lengths])):
            raise ValueError(f"max_lengths must be positive and rise, got {lengths}")

    @classmethod
    def constant(cls, service_s: Mapping[int, float], shares: Mapping[int, float] | None = None) -> ResidentTimes:
        """Of runtimes that take so many seconds for every text, by max_length, and compute texts together with these
        `shares` (see `ServiceCurve`)."""
        found = []
        for length, seconds in sorted(service_s.items()):
            curve = ServiceCurve(((1, seconds, seconds),), (shares[length],) if shares else ())
            found.append((length, curve))
        return cls(tuple(found))

    @property
    def longest(self) -> int:
        """Tokens of the longest text that fits."""
        return self.runtimes[-1][0]

    def tables(self, longest: int) -> Tables:
        """See `ServiceCurve.tables`."""
        found = Tables(*(np.full(longest + 1, np.inf) for _ in Tables._fields))
        for max_length, curve in self.runtimes:
            fitting = min(max_length, longest) + 1
            for least, table in zip(found, curve.tables(fitting - 1), strict=True):
                np.minimum(least[:fitting], table, out=least[:fitting])
        return found
