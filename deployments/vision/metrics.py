"""What a vision service counts."""

from __future__ import annotations

from pliant.deployments.serving.metrics import Followed, Requests
from pliant.deployments.vision import metric_tables as vision
from pliant.deployments.vision.report import EngineReport


class ImageMetrics(Requests):
    """As a gateway sees it; an `endpoint.VisionRecorder`."""

    def answered(self, seconds: float, in_time: bool) -> None:
        self.took(seconds, in_time)


class VisionReplicaMetrics:
    """Of one replica of a vision service, which Ray adds as a tag."""

    def __init__(self, service: str) -> None:
        self._replica = Followed(service, vision.REPLICA)
        self._fates = Followed(service, {"images": vision.FATE}, "fate")
        self._gammas = Followed(service, vision.GAMMAS, "gamma")

    def record(self, report: EngineReport) -> None:
        """Once for every report, in order."""
        self._replica.follow(report)
        for fate in vision.FATES:
            self._fates.follow({"images": report[fate]}, fate)  # type: ignore[literal-required]
        for gamma, one in report["gammas"].items():
            self._gammas.follow(one, str(gamma))
