"""What replicas of a vision service earn: OTAS's utility, by what images of late take and earn with each gamma."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

import numpy as np

from pliant.deployments.serving.messages import News
from pliant.deployments.serving.valuer import Value
from pliant.deployments.vision.report import ReplicaReport
from pliant.policies.vision.value_curve import value_curve


class ImageValuer:
    """A `serving.valuer.Valuer`. What is earned is a share of what images earn with the gamma that suits them best."""

    def hear(self, news: News) -> None:
        """Replicas report what images are like."""

    def value(self, reports: Collection[ReplicaReport], rate: float, spread: float, most: int) -> Value | None:
        measured = [report for report in reports if _best(report)]
        if not measured:
            return None
        curves = []
        for report in measured:
            seconds, earned = np.array(report["earnings"]).T
            utility = value_curve(seconds, {"": (rate, earned)}, most, spread, report["slo_s"])
            curves.append(utility / (rate * _best(report)))
        slowest_s = median(report["earnings"][-1][0] for report in measured)
        return Value(np.median(curves, axis=0), rate * slowest_s)


def _best(report: ReplicaReport) -> float:
    """What an image earns at best; 0 where nothing is known, as of a replica that no image has reached."""
    return max((earned for _, earned in report.get("earnings", [])), default=0.0)
