"""What a vision engine counts and measures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from pliant.deployments.vision.report import GammaReport

_RECENT = 512
_LATELY = 32
"""Batches and decisions from which the next ones are foreseen."""
_CAUTION = 0.75
"""The quantile of recent batches' times that is planned with. In an overload every batch ends close to its deadline, so
that with the median half of them would be late; what is planned much longer than it takes is less accurate for it."""
_LEAST, _MOST = 0.01, 4.0
"""Bounds of the slowdown: a profile may be far too high; a machine that is slower still is broken."""


class Statistics:
    """Counts are since the start, times of late. `gammas` are all that may be computed with."""

    def __init__(self, gammas: Iterable[int]) -> None:
        self.gamma = 0
        """Of the latest batch."""
        self.in_time = self.late = self.evicted = self.shed = self.failed = 0
        self.utility = 0.0
        self._gammas = {gamma: GammaReport(batches=0, images=0, compute_s=0.0) for gamma in gammas}
        self._slowdowns: deque[float] = deque(maxlen=_LATELY)
        self._latencies: deque[float] = deque(maxlen=_RECENT)
        self._decisions: deque[float] = deque(maxlen=_RECENT)

    def computed(self, gamma: int, rows: int, seconds: float, profiled_s: float) -> None:
        """A batch took `seconds`, and according to the profile it should have been `profiled_s`."""
        self.gamma = gamma
        of_gamma = self._gammas[gamma]
        of_gamma["batches"] += 1
        of_gamma["images"] += rows
        of_gamma["compute_s"] += seconds
        self._slowdowns.append(seconds / profiled_s)

    def answered(self, seconds: float, in_time: bool, earned: float) -> None:
        """An image was answered after `seconds`."""
        self.in_time += in_time
        self.late += not in_time
        self.utility += earned
        self._latencies.append(seconds)

    def decided(self, seconds: float) -> None:
        """It took `seconds` to choose what of those that wait runs next."""
        self._decisions.append(seconds)

    @property
    def decision_s(self) -> float:
        """What three of four decisions take of late at most."""
        return _quantile(islice(reversed(self._decisions), _LATELY), _CAUTION)

    @property
    def slowdown(self) -> float:
        """What three of four batches take of late at most, as a multiple of what the profile says."""
        return min(max(_quantile(self._slowdowns, _CAUTION) or 1.0, _LEAST), _MOST)

    def recover(self) -> None:
        """Believe the profile again: what was slow may be over."""
        self._slowdowns.clear()

    def gammas(self) -> dict[int, GammaReport]:
        return {gamma: GammaReport(**report) for gamma, report in self._gammas.items()}

    @property
    def decision_p99_ms(self) -> float:
        return round(_quantile(self._decisions, 0.99) * 1e3, 2)

    def latency_ms(self, quantile: float) -> float:
        return round(_quantile(self._latencies, quantile) * 1e3, 2)


def _quantile(values: Iterable[float], quantile: float) -> float:
    """0 where there are none."""
    ordered = sorted(values)
    return ordered[int(len(ordered) * quantile)] if ordered else 0.0
