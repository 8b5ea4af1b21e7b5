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
_SUPPOSED, _KNOWN = 0.5, 200
"""It is at least the first until there are the second to judge by. In an overload they come within seconds; without it
the first of these seconds would let in what is late."""


class Margin:
    """Learns from requests that were predicted to be done within some seconds, and were within others.

    What a request is late that hardly waited is counted as of one that waits for as long as it may, for at least half
    of its budget: it says little of those, and a millisecond on top of a short wait is no reason to halve long ones.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_LATELY)
        """What they took more, as a share."""
        self._ordered: list[float] = []

    @property
    def value(self) -> float:
        """The share by which predicted waits should be taken for longer, from 0 to 1."""
        known = self._ordered
        learned = known[int(len(known) * _IN_TIME)] if known else 0.0
        return min(_MOST, max(0.0 if len(known) >= _KNOWN else _SUPPOSED, learned))

    def observe(self, predicted_s: float, seconds: float, budget_s: float) -> None:
        """A request took `seconds` of `budget_s`. Raises ValueError if it had none."""
        if not budget_s > 0:
            raise ValueError(f"a budget must be above 0 seconds, got {budget_s}")
        if len(self._recent) == _LATELY:
            del self._ordered[bisect_left(self._ordered, self._recent[0])]
        over = (seconds - predicted_s) / max(predicted_s, budget_s / (1 + _MOST))
        self._recent.append(over)
        insort(self._ordered, over)
