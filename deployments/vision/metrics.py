"""What vision services count, and what their replicas report: the same on Ray's pages and on the gateway's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.metric_table import Described, Table, families, family, replicas_of
from pliant.deployments.serving.metrics import Followed, Requests
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.vision.report import EngineReport

_REPLICA: Table = {
    "gamma": Described(False, "pliant_vision_gamma", "Tokens added to each layer, or merged, in the last batch."),
    "waiting": Described(False, "pliant_vision_images_waiting", "Images that wait for their batch to run."),
    "slowdown": Described(
        False, "pliant_vision_slowdown", "What batches take of late, as a multiple of what the profile says."
    ),
    "decision_p99_ms": Described(
        False, "pliant_vision_decision_p99_milliseconds", "99th percentile of choosing what runs next, of late."
    ),
    "utility": Described(True, "pliant_vision_utility", "Expected utility of the answers in time, summed up."),
}
_GAMMAS: Table = {
    "batches": Described(True, "pliant_vision_batches", "Batches that were computed."),
    "images": Described(True, "pliant_vision_batch_images", "Images in these batches."),
    "compute_s": Described(True, "pliant_vision_compute_seconds", "What these batches took."),
}
_FATES = ("in_time", "late", "evicted", "shed", "failed")
_FATE = Described(True, "pliant_vision_images", f"Images by fate: {', '.join(_FATES)}.")


def vision_metrics(views: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of vision services, for Prometheus."""
    replicas = replicas_of(views)
    yield from families(_REPLICA, replicas)
    fates = family(_FATE, "fate")
    for labels, report in replicas:
        for fate in _FATES:
            fates.add_metric((*labels, fate), report.get(fate, 0))
    yield fates
    gammas = [
        ((*labels, str(gamma)), one) for labels, report in replicas for gamma, one in report.get("gammas", {}).items()
    ]
    yield from families(_GAMMAS, gammas, "gamma")
    tasks = GaugeMetricFamily("pliant_vision_tasks_registered", "Tasks that clients may name.", labels=("service",))
    for service, view in views.items():
        tasks.add_metric((service,), len(view["tasks"]))
    yield tasks


class ImageMetrics(Requests):
    """As a gateway sees it; an `endpoint.VisionRecorder`. The planner hears of it, too, by `tally`."""

    def __init__(self, service: str, kind: str, outcomes: Counter[str], tally: Tally) -> None:
        super().__init__(service, kind, outcomes)
        self._tally = tally

    def arrived(self) -> None:
        self._tally.arrived(1)

    def ended(self, outcome: Outcome) -> None:
        super().ended(outcome)
        if outcome is Outcome.SHED:
            self._tally.shed()

    def answered(self, seconds: float, in_time: bool) -> None:
        self.took(seconds, in_time)
        self._tally.answered(0.0 if in_time else math.inf)


class VisionReplicaMetrics:
    """Of one replica of a vision service, which Ray adds as a tag."""

    def __init__(self, service: str) -> None:
        self._replica = Followed(service, _REPLICA)
        self._fates = Followed(service, {"images": _FATE}, "fate")
        self._gammas = Followed(service, _GAMMAS, "gamma")

    def record(self, report: EngineReport) -> None:
        """Once for every report, in order."""
        self._replica.follow(report)
        for fate in _FATES:
            self._fates.follow({"images": report[fate]}, fate)  # type: ignore[literal-required]
        for gamma, one in report["gammas"].items():
            self._gammas.follow(one, str(gamma))
