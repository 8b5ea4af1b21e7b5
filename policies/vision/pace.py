"""How fast a vision replica's device is: as its profile says, corrected by what batches take of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pliant.policies.vision.token_profile import TokenProfile

_DOUBTED_AFTER_S = 1.0
"""Without a batch: as nothing seems to be worth trying, what made the device slow may be over, or the profile wrong."""
_LATELY = 32
"""Batches from which the next ones are foreseen."""
_CAUTION = 0.9
"""The quantile of recent batches' times that is planned with. In an overload every batch ends close to its deadline, so
that with the median half of them would be late; what is planned much longer than it takes is less accurate for it. In
virtual time, with times that vary by 10 to 30%, 0.9 earned as much below capacity as 0.75 and more above it."""
_LEAST, _MOST = 0.01, 4.0
"""Bounds of the slowdown: a profile may be far too high; a machine that is slower still is broken."""


class Pace:
    """Keeps `profile.slowdown`, by which plans are made. Times are of one clock, on which it is `now`."""

    def __init__(self, profile: TokenProfile, now: float) -> None:
        self._profile = profile
        self._profiled_s = profile.latency_s.copy()
        self._shortest_s = profile.shortest_s
        self._ratios: deque[float] = deque(maxlen=_LATELY)
        """What batches took, over what the profile says."""
        self._computed_at = now
        """When the last batch was done."""

    @property
    def slowdown(self) -> float:
        """What nine of ten batches take of late at most, as a multiple of what the profile says."""
        return self._profile.slowdown

    @property
    def soonest_s(self) -> float:
        """No image takes less, however fast the device is of late."""
        return min(self._shortest_s, self._profile.shortest_s)

    def foreseen_s(self, gamma: int, rows: int) -> float:
        """What a batch will probably take."""
        return self._profile.latency(gamma, rows)

    def computed(self, gamma: int, rows: int, seconds: float, now: float) -> None:
        """A batch is done, which took `seconds`."""
        self._computed_at = now
        self._ratios.append(seconds / float(self._profiled_s[self._profile.gammas.index(gamma), rows - 1]))
        ordered = sorted(self._ratios)
        self._profile.slowdown = min(max(ordered[int(len(ordered) * _CAUTION)], _LEAST), _MOST)

    def in_doubt(self, now: float) -> bool:
        """Whether nothing was computed for so long that what seems to be too late should be tried."""
        return now > self._computed_at + _DOUBTED_AFTER_S

    def recover(self) -> None:
        """Believe the profile until the next batch: what was slow may be over."""
        self._ratios.clear()
        self._profile.slowdown = 1.0

    def fastest(self, task: str, accuracy: Callable[[str, int], float | None]) -> int:
        """The gamma with which an image of `task` takes least, of those for which the task has an accuracy."""
        runnable = [gamma for gamma in self._profile.gammas if accuracy(task, gamma) is not None]
        return min(runnable, key=lambda gamma: self._profile.latency(gamma, 1))
