"""What a vision engine counts and measures, and what its replica reports of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from statistics import median
from typing import TypedDict

from pliant.deployments.serving.parcels import Report
from pliant.policies.vision.value_curve import Asked

_RECENT = 512
_LATELY = 32
"""Decisions from which the next ones are foreseen."""


class GammaReport(TypedDict):
    """Of one gamma, since the start."""

    batches: int
    images: int
    compute_s: float


class EngineReport(TypedDict):
    """Counts but those of what waits and runs now are of images, since the start."""

    backend: str
    gamma: int
    """Of the latest batch."""
    gammas: dict[int, GammaReport]
    """All that may be chosen."""
    waiting: int
    running: int
    tenants: dict[str, float]
    """Seconds of computing that wait, by tenant."""
    in_time: int
    """Answers, be they right or wrong: types 1 and 2 of OTAS §V."""
    late: int
    """Answers: type 3."""
    evicted: int
    """Could not be answered in time any more: type 4."""
    shed: int
    """Had to go because the queue was full."""
    failed: int
    """In batches whose computation broke down."""
    utility: float
    """Expected of the answers in time: each image's, times the accuracy of its task under the gamma that it got."""
    slowdown: float
    """What three of four batches take of late at most, as a multiple of what the profile says."""
    decision_p99_ms: float
    """Of choosing what runs next, of late."""
    p50_ms: float
    """Of recent answers, in this replica: queue and computation."""
    p98_ms: float
    earnings: list[tuple[float, float]]
    """Seconds that an image like those of late takes in a full batch, and the utility that it earns, by gamma."""
    slo_s: float
    """What images of late had until their deadlines when they came, the median; 0 before the first."""
    tasks: list[str]
    """Those in memory."""


class ReplicaReport(EngineReport, Report):
    """What it says to gateways about once a second; it holds images."""

    compiling: bool
    """Whether compiled code is to take over."""
    dropped: dict[int, int]
    """Gammas that no plan needs with these tasks, and the one that is at least as fast and as accurate."""
    failed_tasks: dict[str, str]
    """Registered tasks that could not be loaded, and why."""


class Statistics:
    """Counts are since the start, times of late. `gammas` are all that may be computed with."""

    def __init__(self, gammas: Iterable[int]) -> None:
        self.gamma = 0
        """Of the latest batch."""
        self.in_time = self.late = self.evicted = self.shed = self.failed = 0
        self.utility = 0.0
        self._gammas = {gamma: GammaReport(batches=0, images=0, compute_s=0.0) for gamma in gammas}
        self.asked: deque[Asked] = deque(maxlen=_RECENT)
        """Images that came of late, whatever became of them."""
        self._latencies: deque[float] = deque(maxlen=_RECENT)
        self._decisions: deque[float] = deque(maxlen=_RECENT)

    def computed(self, gamma: int, rows: int, seconds: float) -> None:
        """A batch took `seconds`."""
        self.gamma = gamma
        of_gamma = self._gammas[gamma]
        of_gamma["batches"] += 1
        of_gamma["images"] += rows
        of_gamma["compute_s"] += seconds

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
        return _quantile(islice(reversed(self._decisions), _LATELY), 0.75)

    def gammas(self) -> dict[int, GammaReport]:
        return {gamma: GammaReport(**report) for gamma, report in self._gammas.items()}

    @property
    def slo_s(self) -> float:
        return median(each.slo_s for each in self.asked) if self.asked else 0.0

    @property
    def decision_p99_ms(self) -> float:
        return round(_quantile(self._decisions, 0.99) * 1e3, 2)

    def latency_ms(self, quantile: float) -> float:
        return round(_quantile(self._latencies, quantile) * 1e3, 2)


def _quantile(values: Iterable[float], quantile: float) -> float:
    """0 where there are none."""
    ordered = sorted(values)
    return ordered[int(len(ordered) * quantile)] if ordered else 0.0
