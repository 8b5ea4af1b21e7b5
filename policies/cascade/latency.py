"""What a model takes of a text, told by the text's length (Tabi §5 reads each text once, and takes that).

A single reading says as much of what else the machine did as of the text. Of readings of texts of one length the median
counts, and no text takes less than a shorter one: where medians fall, neighbouring lengths share the median of all
their readings (isotonic regression of least absolute error, by pooling adjacent violators). Steps, as those of runtimes
compiled per length, stay steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import numpy as np
from numpy.typing import ArrayLike

from pliant.policies.cascade.calibration import Floats


class RisingLatency:
    """Fitted to readings of texts of `tokens` [n], in `seconds` [n]; between lengths that were read it is linear, and
    beyond them constant."""

    def __init__(self, tokens: ArrayLike, seconds: ArrayLike) -> None:
        """Raises ValueError unless there is a reading, and as many lengths."""
        read, took = np.asarray(tokens), np.asarray(seconds, np.float64)
        if not read.size or read.shape != took.shape or read.ndim != 1:
            raise ValueError(f"needs the length and the seconds of at least one text, got {read.shape}, {took.shape}")
        order = np.argsort(read, kind="stable")
        self._tokens, firsts = np.unique(read[order], return_index=True)
        self._seconds = _rising([part.tolist() for part in np.split(took[order], firsts[1:])])

    def __call__(self, tokens: ArrayLike) -> Floats:
        """Seconds for texts of so many tokens, of any shape."""
        found: Floats = np.interp(np.asarray(tokens), self._tokens, self._seconds)
        return found


def _rising(read: Sequence[list[float]]) -> Floats:
    """For each list of readings a value, none below the one before: the closest to all readings."""
    pools: list[tuple[float, list[float], int]] = []
    for readings in read:
        value, pooled, lists = median_low(readings), readings, 1
        while pools and pools[-1][0] > value:
            _, before, more = pools.pop()
            pooled, lists = before + pooled, lists + more
            value = median_low(pooled)
        pools.append((value, pooled, lists))
    return np.repeat([value for value, _, _ in pools], [lists for _, _, lists in pools])
