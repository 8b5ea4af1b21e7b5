"""What each model of a cascade says of the texts it is profiled on, and how long it takes (Tabi §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.encoder.confidence import confidence


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model says of each text of the split, and how long it takes."""

    probabilities: Floats
    """Calibrated, [n, classes]."""
    latency_s: Floats
    """Of an idle service, [n], in seconds; of a pruned text with the pruning."""

    @cached_property
    def answers(self) -> Integers:
        """The likeliest class of each text, [n]."""
        likeliest: Integers = self.probabilities.argmax(axis=1)
        return likeliest

    @cached_property
    def confidence(self) -> Floats:
        """Its probability, [n]."""
        return confidence(self.probabilities)


@dataclass(frozen=True, eq=False)
class LevelProfile:
    """One registered model on the whole texts. Its `temperature` was fitted on other texts than these."""

    name: str
    temperature: float
    reading: Reading
    importance_s: Floats | None = None
    """[n]: what it takes to know which words of each text are important. A text pays it once, when it goes on from the
    level by which a chain prunes. None: it costs nothing."""
    encoder: str | None = None
    """Of which it is an exit, or the whole. A text goes on from a level to a later one of the same encoder, and takes
    what it takes longer there."""
    whole: bool = True
    """Exits neither tell which words are important, nor read pruned texts."""
    handed_s: float = 0.0
    """What a text takes here, beyond its reading, when it comes from another model."""


Reread = Callable[[str, str, float], Reading]
"""(reader, pruner, alpha): the reader on the texts less the words that the pruner gave too little attention; costly.

What importance takes the pruner is not in the reader's latency, but in `LevelProfile.importance_s`.
"""


def reference(accuracies: Sequence[float], mean_latencies_s: Sequence[float]) -> int:
    """Which single model all others are measured against: the most accurate, and of several such the fastest."""
    return min(range(len(accuracies)), key=lambda index: (-accuracies[index], mean_latencies_s[index]))


def check(
    levels: Sequence[LevelProfile], labels: NDArray[np.integer], tokens: NDArray[np.integer] | None = None
) -> None:
    """Raises ValueError unless the levels have different names and read the texts that the labels [n] are of.

    So must the lengths of texts be, `tokens` [n], if they are known.
    """
    if not levels or len({level.name for level in levels}) != len(levels):
        raise ValueError(f"needs levels of different names, got {[level.name for level in levels]}")
    if labels.ndim != 1 or not len(labels) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"needs the true class of each text, integers [n], got {labels.dtype} {labels.shape}")
    if tokens is not None and (tokens.shape != labels.shape or not np.issubdtype(tokens.dtype, np.integer)):
        raise ValueError(f"needs the length of each text, integers {labels.shape}, got {tokens.dtype} {tokens.shape}")
    classes = levels[0].reading.probabilities.shape[-1]
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels must be from 0 to {classes - 1}, got {labels.min()} to {labels.max()}")
    for level in levels:
        check_reading(level.reading, (len(labels), classes), level.name)
        if not 0 <= level.handed_s < inf:
            raise ValueError(f"{level.name}: needs at least 0 s for a text from another model, got {level.handed_s}")
        if (importance_s := level.importance_s) is not None and (
            importance_s.shape != labels.shape or not (np.isfinite(importance_s) & (importance_s >= 0)).all()
        ):
            raise ValueError(f"{level.name}: needs a time to tell of at least 0 s for each text, got {importance_s}")


def check_reading(reading: Reading, shape: tuple[int, ...], what: str) -> None:
    """Raises ValueError unless probabilities have the shape [n, classes] and all numbers make sense."""
    if reading.probabilities.shape != shape or reading.latency_s.shape != shape[:1]:
        raise ValueError(
            f"{what}: needs probabilities {shape} and latencies {shape[:1]}, got {reading.probabilities.shape} and "
            f"{reading.latency_s.shape}"
        )
    if not (np.isfinite(reading.latency_s) & (reading.latency_s > 0)).all():
        raise ValueError(
            f"{what}: latencies must be above 0 s and finite, got {reading.latency_s.min()} to "
            f"{reading.latency_s.max()} s"
        )
    if not (reading.probabilities >= 0).all() or not np.allclose(reading.probabilities.sum(axis=1), 1, atol=1e-3):
        raise ValueError(
            f"{what}: probabilities must be at least 0, and those of a text add up to 1, got some of "
            f"{reading.probabilities.min()} and sums up to {reading.probabilities.sum(axis=1).max()}"
        )
