"""Whether a small model's answer is good enough, and how the models that read a text vote (Tabi §4.1 and §4.3).

A text goes to the first level of a cascade. Its calibrated confidence gives the probability of going on to the next
level (equation 4): 1 up to a cut-off, and falling from there on, so that of the surer texts the less sure still mostly
go on. Whoever read a text votes on the answer (equation 6).

The draw that decides is a hash of seed, level and text, not the next number of a stream: the same text is always
routed alike, whichever gateway gets it and whatever else is in flight, and routing repeats from a seed.

Equation 6 averages the softmax; here it is the calibrated one, so that no level's vote counts for more because the
model is overconfident. The paper prints no slope k; see SLOPE.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, nextafter

import numpy as np
from numpy.typing import ArrayLike

from pliant.policies.cascade.calibration import Floats
from pliant.policies.encoder.confidence import softmax
from pliant.texts import Text, parts

SLOPE = 10.0
"""k of equation 4: within the range from the cut-off to 1, the probability then falls from 0.993 to 0.007."""


def reroute_probability(confidence: ArrayLike, cutoff: float, slope: float = SLOPE) -> Floats:
    """The probability of going on to the next level, for confidences of any shape (equation 4).

    With a cut-off of 1 it is 1 for all. With 0 it is not 0 for all: the curve then falls from 0 to 1, and is ½ at ½.
    It never rises with confidence and never falls as the cut-off rises. Raises ValueError for a cut-off outside 0 to 1
    or a slope of 0 or less.
    """
    _check(cutoff, slope)
    sure = np.asarray(confidence, np.float64)
    if cutoff == 1:
        return np.ones_like(sure)
    norm = (sure - cutoff) / (1 - cutoff) - 0.5
    probability: Floats = np.where(sure > cutoff, np.exp(-np.logaddexp(0, slope * norm)), 1.0)
    return probability


def sure_from(draw: float, cutoff: float, slope: float = SLOPE) -> float:
    """The confidence from which on a text with this draw stops, as `reroute_probability` falls no lower than it before.

    That is above 1, and so never, for some draws. Raises ValueError as `reroute_probability` does.
    """
    _check(cutoff, slope)
    if cutoff == 1 or draw == 0:
        return inf
    norm = log((1 - draw) / draw) / slope
    return max(cutoff + (1 - cutoff) * (norm + 0.5), nextafter(cutoff, inf))


def _check(cutoff: float, slope: float) -> None:
    if not 0 <= cutoff <= 1 or not slope > 0:
        raise ValueError(f"a cut-off must be from 0 to 1 and a slope above 0, got {cutoff} and {slope}")


def draw(seed: int, text: Text, level: int) -> float:
    """The number from 0 to 1, uniform over texts, below whose re-route probability `text` goes on from `level`."""
    whole = f"{seed}/{level}/" + "\0".join(parts(text))
    digest = hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def draws(seed: int, texts: Sequence[Text], level: int) -> Floats:
    """`draw` for each text, [n]."""
    return np.array([draw(seed, text, level) for text in texts], np.float64)


def vote(outputs: Sequence[Floats] | Floats, weights: Sequence[float]) -> Floats:
    """The weighted mean of what the levels reached say (equation 6): one array [..., classes] each, of one shape.

    Raises ValueError unless there is one weight, of at least 0, for each level, and some are above 0.
    """
    whole = sum(weights)
    if len(outputs) != len(weights) or not len(outputs) or min(weights) < 0 or not whole > 0:
        raise ValueError(f"needs a weight of at least 0 for each of {len(outputs)} levels, got {tuple(weights)}")
    if len({np.shape(output) for output in outputs}) != 1:
        raise ValueError(f"levels must have the same classes, got shapes {[np.shape(output) for output in outputs]}")
    total: Floats = outputs[0] * (weights[0] / whole)
    for output, weight in zip(outputs[1:], weights[1:], strict=True):
        total += output * (weight / whole)
    return total


def ensemble_weights(right: ArrayLike, mass: ArrayLike) -> tuple[float, ...]:
    """A weight for each level, proportional to its accuracy on re-routed texts; they sum to 1 (§4.3).

    `right` [levels, n] says which texts each level answers rightly, and `mass` [n] with what probability a text gets
    so far. Without any mass or right answer, all weigh alike.
    """
    hits, reached = np.asarray(right, np.float64), np.asarray(mass, np.float64)
    found = hits @ reached
    if not found.sum() > 0:
        return tuple([1 / len(hits)] * len(hits))
    return tuple((found / found.sum()).tolist())


@dataclass(frozen=True)
class Cascade:
    """How texts pass through the levels of a cascade; holds no state, so that any number of requests may share it.

    Raises ValueError unless there is one temperature per level, one cut-off for each but the last, and as many voting
    weights for those that stop at a level as levels have read them by then.
    """

    temperatures: tuple[float, ...]
    cutoffs: tuple[float, ...]
    weights: tuple[tuple[float, ...], ...]
    slope: float = SLOPE
    seed: int = 0

    def __post_init__(self) -> None:
        levels = len(self.temperatures)
        if (
            not levels
            or len(self.cutoffs) != levels - 1
            or [len(row) for row in self.weights] != [*range(1, levels + 1)]
        ):
            raise ValueError(
                f"{levels} levels need {max(0, levels - 1)} cut-offs and voting weights for 1 to {levels} of them, got "
                f"cut-offs {self.cutoffs} and weights {self.weights}"
            )
        if not min(self.temperatures) > 0:
            raise ValueError(f"temperatures must be above 0, got {self.temperatures}")
        for cutoff in self.cutoffs:
            _check(cutoff, self.slope)

    def calibrated(self, logits: ArrayLike, first: int = 0) -> Floats:
        """The probabilities [levels, classes] that levels give, from the logits of those from `first` on, counted from
        0."""
        rows = np.asarray(logits, np.float64)
        return softmax(rows / np.array(self.temperatures[first : first + len(rows)])[:, None])

    def goes_on(self, text: Text, level: int, probabilities: Floats) -> bool:
        """Whether `text` goes on from `level`, counted from 0, whose calibrated `probabilities` are [classes]."""
        return level < len(self.cutoffs) and float(probabilities.max()) < self.sure_from(text, level)

    def sure_from(self, text: Text, level: int) -> float:
        """The calibrated confidence from which on `text` stops at `level`, which is not the last."""
        return sure_from(draw(self.seed, text, level), self.cutoffs[level], self.slope)

    def vote(self, outputs: Sequence[Floats] | Floats) -> Floats:
        """The probabilities [classes] that a text is answered with, from the `calibrated` ones of levels that read it.

        Fewer than it was to be read by will do: then those that did have the say, as if it had stopped there.
        """
        if not 1 <= len(outputs) <= len(self.weights):
            raise ValueError(f"1 to {len(self.weights)} levels vote, got {len(outputs)}")
        return vote(outputs, self.weights[len(outputs) - 1])
