"""How often, and how much, somebody may ask in a minute: a bucket that fills steadily (token bucket).

What a request costs may be known only when it is answered: the bucket then owes, and lets nobody in until it has filled
up again. So over t minutes no more than (t + 1) times the limit is let in, and what the last request let in took.
"""

from __future__ import annotations

import math


class RateLimit:
    """A bucket of `per_minute`, which is full at first and fills within a minute. `now` is in seconds on one clock."""

    def __init__(self, per_minute: float) -> None:
        self._level = math.inf
        self._at = -math.inf
        self.change(per_minute, self._at)

    def change(self, per_minute: float, now: float) -> None:
        """From now on the limit is `per_minute`, of which no more is left than there was."""
        if not per_minute >= 0:
            raise ValueError(f"a limit per minute must be at least 0, got {per_minute}")
        self._level = min(per_minute, self.left(now))
        self.per_minute = per_minute

    def left(self, now: float) -> float:
        """What may be spent now; below 0 when more was spent than there was."""
        if now > self._at:
            if self._at > -math.inf:
                self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
            self._at = now
        return self._level

    def spend(self, amount: float, now: float) -> None:
        """`amount` was spent, whether it was left or not."""
        self._level = self.left(now) - amount

    def give_back(self, amount: float, now: float) -> None:
        """`amount` was not needed after all."""
        self._level = min(self.per_minute, self.left(now) + amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is left; 0 when it is, infinite when it never will be."""
        missing = amount - self.left(now)
        if missing <= 0:
            return 0.0
        return missing * 60 / self.per_minute if amount <= self.per_minute and self.per_minute else math.inf
