"""What a replica of a vision service tells about itself."""

from __future__ import annotations

from typing import TypedDict

from pliant.deployments.serving.parcels import Report


class GammaReport(TypedDict):
    """Of one gamma, since the start."""

    batches: int
    images: int
    compute_s: float


class EngineReport(TypedDict):
    """Counts without "waiting" and "running" are of images, since the start."""

    backend: str
    gamma: int
    """Of the latest batch."""
    gammas: dict[int, GammaReport]
    """All that may be chosen."""
    waiting: int
    running: int
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
