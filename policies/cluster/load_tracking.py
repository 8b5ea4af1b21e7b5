"""How many replicas keep a share of each busy: target tracking, as Kubernetes and Serve do it."""

from __future__ import annotations

import math

_TOLERANCE = 0.1
"""Of the target: load so near to it changes nothing."""


class LoadTracking:
    """Has `target` of the replicas' time busy. More come at once; replicas go when fewer have been wanted for `down_s`.

    `now` is in seconds on a clock that does not run backwards. Raises ValueError for arguments out of range.
    """

    def __init__(self, target: float = 0.7, down_s: float = 300.0) -> None:
        if not (0 < target <= 1 and down_s >= 0):
            raise ValueError(f"target must be from 0 to 1 and down_s not negative, got {target} and {down_s}")
        self.target = target
        self._down_s = down_s
        self._wanted: list[tuple[float, int]] = []

    def desired(self, now: float, load: float, running: int, least: int, most: int) -> int:
        """How many there should be, from `least` to `most`, where each of those `running` is busy for `load` of its
        time."""
        ratio = load / self.target
        count = math.ceil(running * ratio - 1e-9) if running else int(load > 0)
        if abs(ratio - 1) <= _TOLERANCE:
            count = running
        count = min(max(count, least), most)
        self._wanted = [*(each for each in self._wanted if each[0] > now - self._down_s), (now, count)]
        return count if count > running else min(running, max(each for _, each in self._wanted))
