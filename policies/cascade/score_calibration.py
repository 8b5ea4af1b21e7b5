"""How sure a model is of a score, one number per text, in a cascade for score tasks (Tabi §4.1, regression).

A score has no softmax. Its confidence is the probability that the truth lies within a tolerance of it. Errors are
taken to spread by a width that depends on the score: the mean error among texts of similar scores, which has the least
negative log-likelihood if errors are Laplace's; a few that are far off then spoil less than under a normal curve. What
share of them lies within so many widths is read off held-out texts rather than any curve, which is how the work that
Tabi cites recalibrates regression.

What it is for: a cascade of regression models re-routes by this confidence as one of classifiers does by that of the
softmax. No service uses it yet: services of kind `cascade` take classifiers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pliant.policies.cascade.calibration import MIN_SAMPLES, Floats, TooFewSamplesError

MOST_GROUPS = 10


@dataclass(frozen=True)
class ScoreCalibration:
    """What is known of a model's errors; all numbers are in the unit of the score, but for `errors`."""

    tolerance: float
    """A score this far off still counts as right."""
    scores: tuple[float, ...]
    """The mean scores of groups of equally many texts of similar scores, rising."""
    widths: tuple[float, ...]
    """The mean absolute error in each."""
    errors: tuple[float, ...]
    """Absolute errors in widths, of every text that it was fitted on, rising."""

    @classmethod
    def fit(cls, scores: ArrayLike, targets: ArrayLike, tolerance: float) -> ScoreCalibration:
        """From scores and true scores, [n] each, that nothing else is chosen on.

        Raises TooFewSamplesError below MIN_SAMPLES, and ValueError for numbers that make no sense.
        """
        given, truth = np.asarray(scores, np.float64), np.asarray(targets, np.float64)
        if given.ndim != 1 or given.shape != truth.shape or not np.isfinite([given, truth]).all() or not tolerance > 0:
            raise ValueError(
                f"needs finite scores and targets [n] and a tolerance above 0, got shapes {given.shape} and "
                f"{truth.shape}, tolerance {tolerance}"
            )
        if len(given) < MIN_SAMPLES:
            raise TooFewSamplesError(f"calibration needs at least {MIN_SAMPLES} labelled texts, got {len(given)}")
        order = np.argsort(given, kind="stable")
        groups = np.array_split(order, min(MOST_GROUPS, len(given) // MIN_SAMPLES))
        off = np.abs(truth - given)
        least = max(1e-3 * float(off.mean()), 1e-9 * tolerance)
        means = [float(given[group].mean()) for group in groups]
        widths = [max(least, float(off[group].mean())) for group in groups]
        errors = np.sort(off / np.interp(given, means, widths))
        return cls(tolerance, tuple(means), tuple(widths), tuple(errors.tolist()))

    def confidence(self, scores: ArrayLike) -> Floats:
        """The probability, for scores of any shape, that the truth lies within the tolerance; always below 1."""
        widths = np.interp(np.asarray(scores, np.float64), self.scores, self.widths)
        within = np.searchsorted(np.array(self.errors), self.tolerance / widths, side="right")
        probability: Floats = within / (len(self.errors) + 1)
        return probability
