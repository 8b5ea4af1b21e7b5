"""What a request takes on a runtime of each length, from whatever is known of some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


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
