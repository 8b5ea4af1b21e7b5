"""Which gammas no plan needs: another one is neither slower nor less accurate (OTAS §III-A, the task profiler)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pliant.policies.vision.token_profile import Floats


def dominated(gammas: Sequence[int], latency_s: Floats, accuracy: Floats) -> dict[int, int]:
    """Each useless gamma with one that makes it useless and is not useless itself, in the order of `gammas`.

    That one is at least as fast in `latency_s` [gamma, rows], whatever the rows, and at least as accurate in `accuracy`
    [task, gamma] for every task; NaN there means that the task lacks the gamma. Of equals the one nearest to 0 stays.
    Without tasks nobody knows, and none is useless.
    """
    if not len(accuracy):
        return {}
    known = np.nan_to_num(accuracy, nan=-1.0)
    replaces = _at_most(latency_s) & _at_most(-known.T)
    nearer = np.array([[(abs(one), one) < (abs(other), other) for other in gammas] for one in gammas])
    beats = replaces & (nearer | ~replaces.T)
    useful: NDArray[np.bool_] = ~np.any(beats, axis=0)
    return {
        gamma: gammas[int(np.argmax(beats[:, index] & useful))]
        for index, gamma in enumerate(gammas)
        if not useful[index]
    }


def _at_most(costs: Floats) -> NDArray[np.bool_]:
    """Whether row a of `costs` exceeds row b nowhere, [a, b]."""
    return np.array([(row <= costs).all(axis=1) for row in costs])
