"""Whether two models find the same words important, so that one may prune what the other reads (Tabi §4.2)."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.cascade.pruning import Read


class NothingToCompareError(ValueError):
    """No text has two words that both models read."""


class Agreement(NamedTuple):
    """How far two models agree; by chance `top_half` is about 0.5, and `spearman` 0."""

    top_half: float
    """The share of the words in the one model's more important half of a text that are in the other's too, over all
    texts; the paper counts 0.89 between a small and a large model on SST-2."""
    spearman: float
    """The rank correlation of the words' importance within a text, the mean over texts."""
    texts: int
    """How many had two words or more that both models read."""


def agreement(readings: Iterable[tuple[Read, Read]]) -> Agreement:
    """Compares pairs of readings, each of one text by the two models.

    Tokenizers may differ. Raises NothingToCompareError if no text has two words that both models read, and ValueError
    if the texts of a pair differ.
    """
    same = halves = 0
    correlations = []
    for one, other in readings:
        texts, others = ([words.text for words in read] for read in (one, other))
        if texts != others:
            raise ValueError(f"readings of two different texts cannot agree: {texts!r:.40} and {others!r:.40}")
        mine, theirs = (np.concatenate([words.importance for words in read]) for read in (one, other))
        both = np.isfinite(mine) & np.isfinite(theirs)
        if both.sum() < 2:
            continue
        mine, theirs = mine[both], theirs[both]
        half = -(-len(mine) // 2)
        same += len(np.intersect1d(_greatest(mine, half), _greatest(theirs, half)))
        halves += half
        correlations.append(_correlation(_ranks(mine), _ranks(theirs)))
    if not correlations:
        raise NothingToCompareError("agreement needs a text of which both models read two words or more")
    return Agreement(same / halves, float(np.mean(correlations)), len(correlations))


def _greatest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    return np.argsort(-values, stable=True)[:count]


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[place]
    return ranks


def _correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """0 where either is constant, as it says nothing about the other."""
    one, other = one - one.mean(), other - other.mean()
    norm = float(np.sqrt(one @ one * (other @ other)))
    return float(one @ other) / norm if norm else 0.0
