"""What a request takes on a runtime of each length, from whatever is known of some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def service_times(lengths: Sequence[int], known: Mapping[int, float]) -> dict[int, float]:
    """Seconds per request for each of `lengths` (rising), given those of some lengths.

    In between they are interpolated, and outside proportional to length: the hope that a shorter runtime is quicker is
    what makes a planner try it, and then its time is known. A longer runtime never takes less: measured times that say
    so are noise.
    Raises ValueError when nothing is known.
    """
    if not known:
        raise ValueError("needs the service time of at least one length")
    points = sorted(known)
    seconds = np.maximum.accumulate([known[point] for point in points])
    at = np.asarray(lengths)
    outside = np.minimum(at / points[0], 1.0) * np.maximum(at / points[-1], 1.0)
    return dict(zip(lengths, (np.interp(at, points, seconds) * outside).tolist(), strict=True))
