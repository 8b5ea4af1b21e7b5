"""What a request takes on a runtime of each length, from whatever is known of some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np


class LengthTimes:
    """What a request takes on one kind of device, by max_length: as measured now, or when somebody last held it.

    What was measured is believed until something newer is, changed as much as what is held now has changed since. Were
    it forgotten, the hope for a shorter runtime would make a planner try it again and again.
    """

    def __init__(self) -> None:
        self.known: Mapping[int, float] = {}
        """In seconds."""
        self._then: dict[int, Mapping[int, float]] = {}
        """By length: what was `known` when it was last held."""

    def learn(self, held: Mapping[int, float]) -> None:
        """The lengths that are held now, at least one, take so many seconds."""
        believed = {length: then[length] * _change(then, held) for length, then in self._then.items()}
        self.known = {**believed, **held}
        self._then.update(dict.fromkeys(held, self.known))


def _change(then: Mapping[int, float], now: Mapping[int, float]) -> float:
    """By which factor times have changed, as far as the same lengths tell."""
    return median([now[length] / then[length] for length in now.keys() & then.keys()] or [1.0])


def service_times(
    lengths: Sequence[int], observed: Mapping[int, float], profiled: Mapping[int, float] | None = None
) -> dict[int, float]:
    """Seconds per request for each of `lengths` (rising), given those observed and those profiled for some lengths.

    What was observed counts; the profile, scaled to it, tells of other lengths. In between times are interpolated, and
    outside proportional to length: the hope that a shorter runtime is quicker is what makes a planner try it, and then
    its time is known. A shorter runtime never takes more: observations that say so are noise.
    Raises ValueError when nothing is known.
    """
    known = dict(observed)
    if profiled:
        at, seconds = sorted(profiled), [profiled[length] for length in sorted(profiled)]
        ratios = [observed[length] / float(np.interp(length, at, seconds)) for length in observed]
        scale = float(np.median(ratios)) if ratios else 1.0
        known = {length: scale * profiled[length] for length in profiled} | known
    if not known:
        raise ValueError("needs the service time of at least one length")
    points = sorted(known)
    rising = np.minimum.accumulate([known[point] for point in reversed(points)])[::-1]
    wanted = np.asarray(lengths)
    outside = np.minimum(wanted / points[0], 1.0) * np.maximum(wanted / points[-1], 1.0)
    return dict(zip(lengths, (np.interp(wanted, points, rising) * outside).tolist(), strict=True))
