"""How sure a classifier is, in numbers that can be believed: temperature scaling (Tabi §4.1, equations 2 and 3).

A model's softmax says more than its accuracy bears out. One number per model, the temperature that logits are divided
by, mends that without changing any answer. It says nothing honest of texts that it was fitted on.

Beyond the paper: half a text's worth of the labels is taken for a toss-up between the two classes that the model finds
likeliest. That keeps the temperature away from 0 where the model answers all texts of a small split correctly, and is
lost among many texts. (A label that may be any class would not do: of 150 classes nearly all are absurd, and a hundred
texts with one such label make the model much less sure than it is right to be.)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pliant.policies.encoder.confidence import softmax

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MIN_SAMPLES = 50
"""Labelled texts below which no calibration is fitted."""
LOWEST, HIGHEST = 0.01, 100.0
"""Temperatures are fitted between these."""
BINS = 15
"""Of the expected calibration error, of equal width, as in the work on temperature scaling that Tabi cites."""
DOUBT = 0.5
"""Texts' worth of labels that are a toss-up."""
STEPS = 100


class TooFewSamplesError(ValueError):
    """There are too few labelled samples to say anything from."""


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """The temperature of the least negative log-likelihood of the labels [n], given the logits [n, classes].

    The likelihood is concave in the inverse temperature, whose optimum Newton's method finds within a bracket. It is
    LOWEST or HIGHEST where the optimum lies beyond, and 1 where the logits tell no classes apart.
    Raises TooFewSamplesError below MIN_SAMPLES, and ValueError for logits or labels that make no sense.
    """
    scores, truth = _checked(logits, labels)
    scores = scores - scores.max(axis=1, keepdims=True)
    if not scores.any():
        return 1.0
    doubt = DOUBT / (len(truth) + DOUBT)
    likeliest = float(np.partition(scores, -2, axis=1)[:, -2:].mean())
    target = (1 - doubt) * float(scores[np.arange(len(truth)), truth].mean()) + doubt * likeliest

    def derivatives(inverse: float) -> tuple[float, float]:
        """Of the negative log-likelihood per text, by the inverse temperature."""
        probabilities = softmax(scores, 1 / inverse)
        mean = (probabilities * scores).sum(axis=1)
        variance = (probabilities * scores**2).sum(axis=1) - mean**2
        return float(mean.mean()) - target, float(variance.mean())

    low, high = 1 / HIGHEST, 1 / LOWEST
    if derivatives(low)[0] >= 0:
        return HIGHEST
    if derivatives(high)[0] <= 0:
        return LOWEST
    inverse = 1.0
    for _ in range(STEPS):
        first, second = derivatives(inverse)
        low, high = (low, inverse) if first > 0 else (inverse, high)
        newton = inverse - first / second if second > 0 else low
        following = newton if low < newton < high else math.sqrt(low * high)
        if abs(following - inverse) <= 1e-9 * inverse:
            break
        inverse = following
    return 1 / inverse


def expected_calibration_error(confidence: ArrayLike, right: ArrayLike, bins: int = BINS) -> float:
    """How far confidence lies from accuracy: their difference within each bin, weighted by the texts in it.

    `confidence` [n] is from 0 to 1, `right` [n] says which answers were. Bins have equal width and hold their upper
    edge. Chance alone keeps it above 0, the more so the fewer the texts.
    """
    sure, hits = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    if sure.ndim != 1 or sure.shape != hits.shape or not len(sure):
        raise ValueError(f"needs as many confidences as answers, got shapes {sure.shape} and {hits.shape}")
    if not ((sure >= 0) & (sure <= 1)).all() or bins < 1:
        raise ValueError(
            f"confidences must be from 0 to 1 and bins at least 1, got {sure.min()} to {sure.max()} and {bins}"
        )
    members = np.clip(np.ceil(sure * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(members, weights=sure - hits, minlength=bins)
    return float(np.abs(gaps).sum() / len(sure))


def _checked(logits: ArrayLike, labels: ArrayLike) -> tuple[Floats, Integers]:
    scores, truth = np.asarray(logits, np.float64), np.asarray(labels)
    if scores.ndim != 2 or scores.shape[1] < 2 or truth.shape != scores.shape[:1]:
        raise ValueError(
            f"needs logits [n, classes] of at least 2 classes and labels [n], got {scores.shape} and {truth.shape}"
        )
    if len(truth) < MIN_SAMPLES:
        raise TooFewSamplesError(
            f"a temperature needs at least {MIN_SAMPLES} labelled texts, got {len(truth)}: label more, or give "
            "calibration a larger share of them"
        )
    if not np.issubdtype(truth.dtype, np.integer) or truth.min() < 0 or truth.max() >= scores.shape[1]:
        raise ValueError(f"labels must be integers from 0 to {scores.shape[1] - 1}, got {truth.min()} to {truth.max()}")
    if not np.isfinite(scores).all():
        raise ValueError(f"logits must be finite, {np.count_nonzero(~np.isfinite(scores))} are not")
    return scores, truth.astype(np.int64)
