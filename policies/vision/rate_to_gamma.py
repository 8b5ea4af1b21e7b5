"""Which gamma carries which rate: the function f of OTAS §III-D, from the profile instead of table I.

The rate itself is that of the last moments, in which every arrival counts less and less.
"""

from __future__ import annotations

import math

from pliant.policies.vision.token_profile import TokenProfile

LOAD = 0.65
"""Share of a gamma's greatest throughput up to which it is used: what table I comes to, compared with figure 4b."""

_LEAST_SEEN = 0.1
"""Share of a window that is taken to have passed when the first arrival comes."""


class RateToGamma:
    """f(q): the greatest gamma that carries q queries per second with `load` of its throughput; else the fastest.

    Raises ValueError for a share that makes no sense.
    """

    def __init__(self, profile: TokenProfile, load: float = LOAD) -> None:
        if not 0 < load <= 1:
            raise ValueError(f"load must be above 0 and at most 1, got {load}")
        self._profile = profile
        self._load = load

    def __call__(self, rate: float) -> int:
        most = dict(zip(self._profile.gammas, (self._load / self._profile.row_s()).tolist(), strict=True))
        return max((gamma for gamma in most if most[gamma] >= rate), default=max(most, key=most.__getitem__))


class RecentRate:
    """What comes per second, of late: an arrival `window_s` seconds ago counts 1/e of one now."""

    def __init__(self, window_s: float) -> None:
        if not 0 < window_s < math.inf:
            raise ValueError(f"window_s must be positive and finite, got {window_s}")
        self._window_s = window_s
        self._sum = 0.0
        self._start: float | None = None
        self._last = 0.0

    def add(self, now: float, weight: float = 1.0) -> None:
        """Something of such a weight comes. `now` is in seconds on any clock that does not run backwards."""
        if self._start is None:
            self._start = now
        self._sum = self._sum * self._left(now - self._last) + weight
        self._last = now

    def value(self, now: float) -> float:
        """Weight per second; 0 before the first."""
        if self._start is None:
            return 0.0
        seen_s = self._window_s * max(1 - self._left(now - self._start), _LEAST_SEEN)
        return self._sum * self._left(now - self._last) / seen_s

    def _left(self, seconds: float) -> float:
        return math.exp(-seconds / self._window_s)
