"""What happened to a simulated stream of requests: latencies, misses, and what it took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes

from pliant.simulation.arrivals import Floats

_GROWTH = 1.005
_LEAST_S = 1e-5
_BINS = 5000


class Latencies:
    """The distribution of latencies in seconds, in bins of half a percent; sum and count are exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, dtype=np.int64)
        self._sum = 0.0
        self.count = 0

    def add(self, seconds: Floats) -> None:
        bins = np.log(np.maximum(seconds, _LEAST_S) / _LEAST_S) / math.log(_GROWTH)
        self._counts += np.bincount(np.minimum(bins.astype(np.int64), _BINS - 1), minlength=_BINS)
        self._sum += float(seconds.sum())
        self.count += len(seconds)

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The latency that `share` of the requests do not exceed."""
        if not self.count:
            return math.nan
        rank = int(np.searchsorted(np.cumsum(self._counts), share * self.count))
        return float(_LEAST_S * _GROWTH ** (rank + 0.5))

    def cdf(self) -> tuple[Floats, Floats]:
        """Latencies, rising, and the share of requests that do not exceed each."""
        filled = np.flatnonzero(self._counts)
        seconds = _LEAST_S * _GROWTH ** (np.arange(filled[0], filled[-1] + 1) + 1.0)
        return seconds, np.cumsum(self._counts)[filled[0] : filled[-1] + 1] / self.count


@dataclass
class Outcome:
    """What happened to a stream of requests."""

    requests: int = 0
    shed: int = 0
    """Refused, because no replica was predicted to answer in time."""
    within_slo: int = 0
    latencies: Latencies = field(default_factory=Latencies)
    busy_s: float = 0.0
    """Service time of all requests."""
    gpu_s: float = 0.0
    """Replicas, integrated over the stream's seconds."""
    seconds: int = 0
    arrived: list[int] = field(default_factory=list)
    """For each second: requests that arrived in it."""
    missed: list[int] = field(default_factory=list)
    """For each second: those of them that were shed or answered too late."""
    counts: list[dict[int, int]] = field(default_factory=list)
    """For each second, at its end: replicas by max_length."""
    running: list[int] = field(default_factory=list)
    """For each second, at its end: replicas that occupy a GPU."""

    @property
    def attainment(self) -> float:
        """Share of all requests, those that were shed included, which were answered within the SLO."""
        return self.within_slo / self.requests if self.requests else math.nan

    @property
    def utilisation(self) -> float:
        """Share of the replicas' time in which they computed."""
        return self.busy_s / self.gpu_s if self.gpu_s else math.nan

    @property
    def gpus(self) -> float:
        """Time-weighted number of replicas."""
        return self.gpu_s / self.seconds if self.seconds else math.nan


def plot_allocation(axes: Axes, outcome: Outcome) -> None:
    """Draw the replicas of each max_length over time, stacked."""
    lengths = sorted({length for counts in outcome.counts for length in counts})
    minutes = np.arange(len(outcome.counts)) / 60
    stacked = [[counts.get(length, 0) for counts in outcome.counts] for length in lengths]
    axes.stackplot(minutes, stacked, labels=[str(length) for length in lengths], step="post")
    axes.set(xlabel="minutes", ylabel="replicas")
    axes.legend(title="max_length", loc="center left", bbox_to_anchor=(1, 0.5))
