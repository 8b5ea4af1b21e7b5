"""How fast a vision replica's device is: as its profile says, corrected by what batches take of late."""

from __future__ import annotations

from pliant.deployments.vision.statistics import Statistics
from pliant.deployments.vision.tasks import Tasks
from pliant.policies.vision.token_profile import TokenProfile

_DOUBTED_AFTER_S = 1.0
"""Without a batch: as nothing seems to be worth trying, what made the device slow may be over, or the profile wrong."""


class Pace:
    """Keeps `profile.slowdown`, by which plans are made. Times are of one clock, on which it is `now`."""

    def __init__(self, profile: TokenProfile, statistics: Statistics, now: float) -> None:
        self._profile = profile
        self._profiled_s = profile.latency_s.copy()
        self._shortest_s = profile.shortest_s
        self._statistics = statistics
        self._computed_at = now
        """When the last batch was done."""

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
        profiled_s = float(self._profiled_s[self._profile.gammas.index(gamma), rows - 1])
        self._statistics.computed(gamma, rows, seconds, profiled_s)
        self._profile.slowdown = self._statistics.slowdown

    def in_doubt(self, now: float) -> bool:
        """Whether nothing was computed for so long that what seems to be too late should be tried."""
        return now > self._computed_at + _DOUBTED_AFTER_S

    def recover(self) -> None:
        """Believe the profile until the next batch."""
        self._statistics.recover()
        self._profile.slowdown = self._statistics.slowdown

    def fastest(self, task: str, tasks: Tasks) -> int:
        """The gamma with which an image of the task with this key takes least."""
        runnable = [gamma for gamma in self._profile.gammas if tasks.accuracy(task, gamma) is not None]
        return min(runnable, key=lambda gamma: self._profile.latency(gamma, 1))
