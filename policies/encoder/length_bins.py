"""Which lengths to compile runtimes for, from a measured profile and the lengths that arrive (Arlo §3.2).

The paper spaces runtimes evenly, by the step size of the staircase. Here a dynamic program places them where they save
the most computing time over the observed lengths (beyond the paper). Each further runtime must be compiled and splits
the pool of replicas, so the fewest are chosen that come close to the best.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pliant.formats.profile import EVEN_BINS, Profile

CLOSE = 0.025
"""How much more expected time than the best the chosen bins may cost, as a share."""


def auto_lengths(profile: Profile, histogram: ArrayLike | None = None, most: int = EVEN_BINS) -> tuple[int, ...]:
    """The rising max_lengths that a service should have runtimes for, at most `most`.

    Where static runtimes do not pay, it is the longest alone, for a dynamic runtime. `histogram` is as for
    `choose_bins`, which puts bins at the edges of the profile's staircase, because longer ones cost a jump.
    """
    if not profile.static_pays:
        return (profile.longest,)
    return choose_bins(profile.lengths, profile.static_s, histogram, most)


def choose_bins(
    candidates: Sequence[int], service_s: Sequence[float], histogram: ArrayLike | None, most: int
) -> tuple[int, ...]:
    """The bins, at most `most` of the candidates, that bring the expected service time within CLOSE of the least.

    `candidates` are rising max_lengths in tokens, the last of which is always chosen; `service_s[i]` is the seconds
    that any text takes on the i-th. A text runs on the shortest bin it fits into. `histogram[l]` counts the texts of l
    tokens; without it, or if it is empty, all lengths are alike. Exact, in O(most * candidates²). Raises ValueError for
    arguments that make no sense.
    """
    if len(candidates) != len(service_s) or not candidates or min(service_s) <= 0 or most < 1:
        raise ValueError("needs a positive service time for each of at least one candidate, and at least one bin")
    if list(candidates) != sorted(set(candidates)) or candidates[0] < 1:
        raise ValueError(f"candidates must be positive and rise, got {candidates}")
    texts = _texts_up_to(candidates, histogram)
    seconds = np.asarray(service_s, dtype=np.float64)

    # total[j]: the least time of all texts that fit into candidate j, if that is the last of a number of bins.
    total = seconds * texts
    totals, before = [total], []
    # added[i, j]: the time that candidate j as the next bin after i adds; never for j <= i.
    added = np.where(np.tri(len(texts), dtype=bool), np.inf, seconds * (texts - texts[:, None]))
    for _ in range(1, min(most, len(candidates))):
        choices = total[:, None] + added
        before.append(choices.argmin(axis=0))
        total = choices.min(axis=0)
        totals.append(total)
    expected = np.array([total[-1] for total in totals])
    number = int(np.argmax(expected <= (1 + CLOSE) * expected.min()))

    chosen = [len(candidates) - 1]
    for step in reversed(before[:number]):
        chosen.append(int(step[chosen[-1]]))
    return tuple(candidates[index] for index in reversed(chosen))


def _texts_up_to(candidates: Sequence[int], histogram: ArrayLike | None) -> NDArray[np.float64]:
    """How many texts fit into each candidate."""
    counts = np.zeros(0) if histogram is None else np.asarray(histogram, dtype=np.float64)
    if counts.ndim != 1 or (counts < 0).any() or counts[candidates[-1] + 1 :].any():
        raise ValueError(f"the histogram must count texts of up to {candidates[-1]} tokens")
    if not counts.any():
        return np.asarray(candidates, dtype=np.float64)
    return np.cumsum(counts)[np.minimum(candidates, len(counts) - 1)]
