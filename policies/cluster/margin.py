"""What admission keeps back of a deadline: by how much waits turned out longer than predicted, of late.

Under overload all that are let in wait for as long as they may, so that whatever predictions lack makes answers late.
The margin is a share of the predicted wait for others, so that it suits long and short budgets alike, costs little
where little waits, and never keeps a request from an idle replica: whoever refuses always goes on learning.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_LATELY = 512
"""Requests by which the next ones are judged."""
_IN_TIME = 0.99
"""Of them, that would have been in time with the margin."""
_MOST = 1.0
"""However wrong predictions are, half of the time left may be waited."""


class Margin:
    """Learns from requests that were predicted to be done within some seconds, and were within others."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_LATELY)
        """What they took more, as a share of what was predicted."""
        self._ordered: list[float] = []

    @property
    def value(self) -> float:
        """The share by which predicted waits should be taken for longer, from 0 to 1; 0 while nothing is known."""
        if not self._ordered:
            return 0.0
        return min(_MOST, max(0.0, self._ordered[int(len(self._ordered) * _IN_TIME)]))

    def observe(self, predicted_s: float, seconds: float) -> None:
        """A request took `seconds`. Raises ValueError if it was not predicted to take any."""
        if not predicted_s > 0:
            raise ValueError(f"a prediction must be above 0 seconds, got {predicted_s}")
        if len(self._recent) == _LATELY:
            del self._ordered[bisect_left(self._ordered, self._recent[0])]
        over = seconds / predicted_s - 1
        self._recent.append(over)
        insort(self._ordered, over)
