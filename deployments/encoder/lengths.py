"""The input lengths that a service's replicas may hold: as configured, or chosen from a latency profile (Arlo §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.formats.profile import Profile
from pliant.policies.encoder.length_bins import auto_lengths

_WORTHWHILE = 0.05
"""By how much other lengths must shorten the mean service time before new runtimes are compiled for them."""


class Lengths:
    """`current` are the max_lengths that plans may use, in rising order; the last, `longest`, never changes.

    With a profile they follow the lengths that arrive; `configured` ones stay.
    """

    def __init__(self, configured: Sequence[int] | None, profile: Profile | None) -> None:
        self._profile = None if configured else profile
        if configured:
            self.current = tuple(configured)
        elif profile:
            self.current = auto_lengths(profile)
        else:
            raise ValueError("lengths must be configured, or follow from a profile")
        self.longest = self.current[-1]

    @property
    def dynamic(self) -> bool:
        """Whether there is but one length, on a runtime that takes each text at its own."""
        return self._profile is not None and not self._profile.static_pays

    @property
    def service_s(self) -> dict[int, float]:
        """What a request takes on a static runtime of each max_length, in seconds, as far as it was profiled."""
        if not self._profile or self.dynamic:
            return {}
        return dict(zip(self._profile.lengths, self._profile.static_s, strict=True))

    def choose(self, histogram: NDArray[Any]) -> bool:
        """Adapt `current` to the texts that arrived, `histogram[l]` of them with l tokens; whether it changed."""
        if not self._profile or self.dynamic or not histogram.any():
            return False
        better = auto_lengths(self._profile, histogram)
        if self._mean_s(better, histogram) > (1 - _WORTHWHILE) * self._mean_s(self.current, histogram):
            return False
        self.current = better
        return True

    def _mean_s(self, lengths: Sequence[int], histogram: NDArray[Any]) -> float:
        assert self._profile
        times = np.array([self._profile.service_s(length, dynamic=False) for length in lengths])
        bins = np.searchsorted(lengths, np.minimum(np.arange(len(histogram)), lengths[-1]))
        return float(np.average(times[bins], weights=histogram))
