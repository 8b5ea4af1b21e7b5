"""What a kind says of a service to whoever shares one budget out: how much of its demand replicas can do in time."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.serving.messages import News
from pliant.deployments.serving.parcels import Report

Floats = NDArray[np.float64]

ReportIn = TypeVar("ReportIn", bound=Report, contravariant=True)


class Value(NamedTuple):
    in_time: Floats
    """The share of requests that meet their objectives, with 0 to so many replicas."""
    busy: float
    """Replicas that these requests keep busy."""


class Valuer(Protocol[ReportIn]):
    """Of one service. It learns what requests are like from gateways, and how fast replicas are from their reports."""

    def hear(self, news: News) -> None:
        """Take in what a gateway saw."""

    def value(self, reports: Collection[ReportIn], rate: float, spread: float, most: int) -> Value | None:
        """Of `rate` requests per second, above 0, with 0 to `most` replicas.

        `spread` is the standard deviation of rates over their forecast. None as long as too little was measured.
        """
