"""What a service will be asked for soon: its rate now, and what has proved to follow from how it moves.

How much the rate changes until the horizon is regressed on its latest changes (the trend), on how far it is from its
mean over some and over many bins (the level, to which a spike returns), and on how it changed at this time of earlier
days (the season). The regression is recursive least squares, forgets slowly, and gives each observation the weight that
makes errors count by their size and not by their square, as a few spikes would decide all otherwise. It begins with "as
now", and so does a service without history.

A quantile scales the forecast by what was observed over what had been forecast. The spread has, beside the forecast's
errors, how rates vary within a bin, more than by chance: requests come in bursts, and a queue is as long as its worst
second.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DAY_S = 86_400.0
_SMOOTHING = np.array([0.5, 0.2, 0.05])
"""Of levels."""
_FEATURES = 6
_PRIOR = 0.003
"""How sure it is, before anything is observed, that the rate stays as it is: more is less sure."""
_FORGET = 0.998
_MOST_UNITS = 1e3
"""Of the usual error, that a feature counts at most: the first change after a steady rate is no measure."""
_KEPT_PRIOR = 0.01
"""Of that, which is not forgotten."""
_DAYS = 0.5
"""Weight of the latest day in the profile of a day."""
_SMOOTHED_S = 600.0
"""Of a day, that is averaged: counts are noisy."""
_KEPT = 500
"""Ratios of observed to forecast, for quantiles."""
_FEW = 20
LOOK_S = 2
"""Seconds between two looks whether demand has surged, each over so many: then a bin's end is not waited for."""
_LATELY_S = 60.0
"""Over which demand must be less before anybody does with less."""
_BURSTS = 0.05
"""Weight of the latest bin's."""
_SURGE = 4.0
"""Standard deviations beyond what is planned for, that chance does not make."""
_SURGES_BY = 2.0
"""Requests, and as many times what is planned for, that a surge has at least: a lesser one can wait."""
_TENTHS = 2.563
"""Standard deviations from the first to the last tenth of a normal distribution."""


def excess(counts: Floats) -> float:
    """By how much the variance of requests per second is beyond Poisson's; 0 on average where they come by chance.

    `counts` are of the seconds of one bin; of fewer than two nothing is known.
    """
    return float(counts.var(ddof=1) - counts.mean()) if len(counts) > 1 else 0.0


def surges(lately: Mapping[str, Floats], forecasts: Mapping[str, Forecast]) -> dict[str, float]:
    """Requests per second, where so many more came in the latest seconds than was planned for. `lately` and `forecasts`
    are by service, the one of requests by second."""
    return {name: float(counts.mean()) for name, counts in lately.items() if forecasts[name].surged(counts)}


class Forecast:
    """Of a rate that is observed in bins of `bin_s` seconds, `ahead` bins ahead. Raises ValueError unless positive."""

    def __init__(self, bin_s: float, ahead: int) -> None:
        if not (bin_s > 0 and ahead >= 1):
            raise ValueError(f"bin_s must be positive and ahead at least 1, got {bin_s} and {ahead}")
        self._ahead = ahead
        self._bins = max(1, round(DAY_S / bin_s))
        self._profile: Floats | None = None
        """Mean rate by time of day, over the days before today."""
        self._today: list[float] = []
        self._seen = 0
        self._last: Floats = np.zeros(3)
        """The latest rates, the newest first."""
        self._levels: Floats = np.zeros(len(_SMOOTHING))
        self._weights: Floats = np.zeros(_FEATURES)
        self._information: Floats = np.eye(_FEATURES) / _PRIOR
        """Its inverse, the covariance of the weights, would grow out of bounds where a feature says nothing for a day,
        and rounding with it."""
        self._moments: Floats = np.zeros(_FEATURES)
        """The weights, times the information."""
        self._scale = 0.0
        """The usual size of an error."""
        self._made: deque[tuple[Floats, float, float]] = deque()
        """Features, rate and forecast of the bins whose horizon has not come."""
        self._ratios: deque[float] = deque(maxlen=_KEPT)
        self._lately: deque[float] = deque(maxlen=max(1, round(_LATELY_S / bin_s)))
        self._excess = self._square = 0.0
        """The means of `excess` and of the rate's square, of late."""

    def look(self, ahead: int) -> None:
        """Forecast so many bins ahead from the next bin on. Raises ValueError unless positive.

        A nearer horizon begins with a part of what was learned, a farther one with all of it: both are as unsure of it
        as at first, and learn on.
        """
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}")
        if ahead == self._ahead:
            return
        self._weights *= min(1.0, ahead / self._ahead)
        self._information = np.eye(_FEATURES) / _PRIOR
        self._moments = self._weights / _PRIOR
        self._ahead = ahead
        while len(self._made) > ahead:
            self._made.popleft()

    def observe(self, rate: float, beyond: float = 0.0) -> None:
        """The rate of the bin that is over, and its `excess`; bins follow each other without a gap."""
        self._excess += _BURSTS * (beyond - self._excess)
        self._square += _BURSTS * (rate * rate - self._square)
        if len(self._made) == self._ahead:
            features, then, forecast = self._made.popleft()
            self._ratios.append((rate + 1e-9) / (forecast + 1e-9))
            self._learn(features, rate - then)
        if not self._seen:
            self._last[:] = rate
            self._levels[:] = rate
        self._last = np.array([rate, *self._last[:-1]])
        self._levels += _SMOOTHING * (rate - self._levels)
        self._today.append(rate)
        self._lately.append(rate)
        self._seen += 1
        features = self._features()
        self._made.append((features, rate, max(0.0, rate + float(self._weights @ features))))
        if len(self._today) == self._bins:
            self._keep_day()

    @property
    def rate(self) -> float:
        """`ahead` bins after the last one observed; 0 before the first."""
        return self._made[-1][2] if self._made else 0.0

    @property
    def planned(self) -> float:
        """What to be ready for: the forecast, but no less than the latest bin, nor than the last minute.

        Most spikes return to their level, and so forecasts do, but those that last cost the most until replicas have
        started; and one quiet moment is no reason to do with less.
        """
        lasting = sum(self._lately) / len(self._lately) if self._lately else 0.0
        return max(self.rate, float(self._last[0]), lasting)

    def surged(self, counts: Floats) -> bool:
        """Whether far more came in these seconds than chance, and bursts as there were, make of what is planned for."""
        expected = self.planned * len(counts)
        deviation = math.sqrt(expected + len(counts) * max(0.0, self._excess))
        return bool(counts.sum() > _SURGES_BY + max(_SURGES_BY * expected, expected + _SURGE * deviation))

    def quantile(self, share: float) -> float:
        """The rate that is not exceeded with a probability of `share`, by how forecasts went so far."""
        if len(self._ratios) < _FEW:
            return self.rate
        return self.rate * float(np.quantile(np.array(self._ratios), share))

    @property
    def spread(self) -> float:
        """The standard deviation of the rate of a second over the forecast, by the middle four fifths of how forecasts
        went, and by bursts."""
        errors = 0.0
        if len(self._ratios) >= _FEW:
            low, high = np.quantile(np.array(self._ratios), (0.1, 0.9))
            errors = float(high - low) / _TENTHS
        bursts = max(0.0, self._excess) / self._square if self._square > 0 else 0.0
        return math.sqrt(errors * errors + bursts)

    def _features(self) -> Floats:
        rate = self._last[0]
        season = 0.0
        if self._profile is not None:
            now = (self._seen - 1) % self._bins
            usual = float(self._profile[now])
            season = rate * (float(self._profile[(now + self._ahead) % self._bins]) / usual - 1) if usual > 0 else 0.0
        return np.array([*(self._last[:-1] - self._last[1:]), *(self._levels - rate), season])

    def _learn(self, features: Floats, change: float) -> None:
        """Recursive least squares; features and changes are in units of the usual error."""
        error = change - float(self._weights @ features)
        self._scale += 0.02 * (abs(error) - self._scale) if self._scale else abs(error)
        unit = max(self._scale, float(np.abs(features).max()) / _MOST_UNITS, 1e-12)
        scaled = features / unit
        weight = 1 / max(1.0, abs(error) / unit)
        kept: Floats = (1 - _FORGET) * _KEPT_PRIOR / _PRIOR * np.eye(_FEATURES, dtype=np.float64)
        seen: Floats = weight * np.outer(scaled, scaled)
        self._information = _FORGET * self._information + seen + kept
        self._moments = _FORGET * self._moments + weight * (change / unit) * scaled
        self._weights = np.linalg.solve(self._information, self._moments).astype(np.float64)

    def _keep_day(self) -> None:
        day = _smooth(np.array(self._today))
        self._profile = day if self._profile is None else (1 - _DAYS) * self._profile + _DAYS * day
        self._today = []


def _smooth(day: Floats) -> Floats:
    """Each bin's mean with its neighbours, around the clock."""
    half = round(_SMOOTHED_S / DAY_S * len(day) / 2)
    smooth: Floats = np.mean([np.roll(day, shift) for shift in range(-half, half + 1)], axis=0)
    return smooth
