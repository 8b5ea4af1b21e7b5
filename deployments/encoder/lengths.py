"""The lengths at which a service's replicas may be at home: configured, or from a latency profile (Arlo §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.config.encoder import EncoderConfig
from pliant.formats.profile import Profile, RuntimeKind
from pliant.policies.encoder.length_bins import auto_lengths

_WORTHWHILE = 0.05
"""By how much other lengths must shorten the mean service time before new runtimes are compiled for them."""
_SHORTEST_HOME = 32


def measured_kind(config: EncoderConfig, profile: Profile | None) -> tuple[RuntimeKind, str] | None:
    """What the service's replicas compute on, and why; None if that is still to be measured."""
    if config.by_length and config.lengths:
        return "static", f"static: residency is {config.residency}"
    if config.with_exits:
        return "packed", "packed: texts leave early"
    if profile is None:
        return None
    if config.by_length:
        return "static" if profile.static_pays else "dynamic", f"residency is {config.residency}. {profile.summary()}"
    return profile.fastest(config.lengths), profile.reason(config.lengths)


class Lengths:
    """`current` are the lengths that plans may use, in rising order; the last, `longest`, never changes.

    Where a replica's runtime takes all lengths (`resident`), up to `longest`, they are where it may be at home. Else
    they are the max_lengths of runtimes, and follow the lengths that arrive. `configured` ones stay.
    """

    def __init__(
        self, configured: Sequence[int] | None, profile: Profile | None, *, resident: bool = False, longest: int = 0
    ) -> None:
        self.resident = resident
        self._profile = None if configured or resident else profile
        if configured:
            self.current = tuple(configured)
        elif resident and longest:
            homes = (_SHORTEST_HOME << power for power in range(16))
            self.current = (*(home for home in homes if home < longest), longest)
        elif self._profile:
            self.current = auto_lengths(self._profile)
        else:
            raise ValueError("lengths must be configured, or follow from a profile")
        self.longest = self.current[-1]

    @property
    def service_s(self) -> dict[int, float]:
        """What a request takes on a static runtime of each max_length, in seconds, as far as it was profiled."""
        if not self._profile or not self._profile.static_pays:
            return {}
        return dict(zip(self._profile.lengths, self._profile.static_s, strict=True))

    def choose(self, histogram: NDArray[Any]) -> bool:
        """Adapt `current` to the texts that arrived, `histogram[l]` of them with l tokens; whether it changed."""
        if not self._profile or not self._profile.static_pays or not histogram.any():
            return False
        better = auto_lengths(self._profile, histogram)
        if self._mean_s(better, histogram) > (1 - _WORTHWHILE) * self._mean_s(self.current, histogram):
            return False
        self.current = better
        return True

    def _mean_s(self, lengths: Sequence[int], histogram: NDArray[Any]) -> float:
        assert self._profile
        times = np.array([self._profile.service_s(length, "static") for length in lengths])
        bins = np.searchsorted(lengths, np.minimum(np.arange(len(histogram)), lengths[-1]))
        return float(np.average(times[bins], weights=histogram))
