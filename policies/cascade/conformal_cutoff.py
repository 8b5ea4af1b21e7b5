"""Cut-offs under which early answers are rarely not the large model's, with a guarantee (beyond Tabi §4.1).

For a cut-off c, the texts answered early form a sample of all texts that it would answer early, and how many of them
disagree with what the large model says of them, whole, is binomial: the chance of so few, were the true share above
epsilon, is exact, for any model, number of texts and calibration, as long as these texts and those to come are
exchangeable. Cut-offs are tested from the most careful one on. Each has its part of delta, and what led to a success
passes on to the next (the fallback procedure), so that a cut-off too careful to answer enough texts early does not stop
the search. With probability 1 - delta no cut-off is certified wrongly, so that any of the certified may be chosen, on
the same texts too.

Confidences here are those of temperatures that the text had no part in (cross-fitting), and a cascade serves with one
that was fitted on all: the guarantee leaves out what the fifth of the texts more say of that one number.

The guarantee is for one pair of levels and one slope. For a chain of levels, or several, share out delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pliant.policies.cascade.candidates import CUTOFFS
from pliant.policies.cascade.cascade import SLOPE, reroute_probability


@dataclass(frozen=True)
class ConformalCutoffs:
    """What was certified, and on what grounds."""

    certified: tuple[float, ...]
    """Cut-offs, falling, all of which hold at once; none when there are too few texts or too many disagreements."""
    early: int
    """Texts that the lowest certified cut-off answers early, or if none is certified, the one that came closest."""
    disagreements: int
    """Among them."""
    fewest_texts: int
    """Early answers without one disagreement that would certify a single cut-off with its part of delta."""

    def __str__(self) -> str:
        had = f"{self.early} early texts, of which {self.disagreements} disagree"
        if self.certified:
            return f"certifies {len(self.certified)} cut-offs, from {min(self.certified):g} up: {had}"
        return f"no cut-off can be certified: needs about {self.fewest_texts} early texts that all agree, had {had}"


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """The chance of at most `successes` in `trials` of `probability` each, exactly."""
    if not 0 <= successes <= trials or not 0 < probability < 1:
        raise ValueError(f"needs 0 <= successes <= trials and a probability, got {successes}, {trials}, {probability}")
    odds = math.log(probability) - math.log1p(-probability)
    term = trials * math.log1p(-probability)
    total = math.exp(term)
    for count in range(1, successes + 1):
        term += math.log((trials - count + 1) / count) + odds
        total += math.exp(term)
    return min(1.0, total)


def conformal_cutoffs(
    confidence: ArrayLike,
    draws: ArrayLike,
    disagrees: ArrayLike,
    epsilon: float,
    delta: float = 0.05,
    cutoffs: Sequence[float] = CUTOFFS,
    slope: float = SLOPE,
) -> ConformalCutoffs:
    """The cut-offs whose early answers disagree with the large model on at most `epsilon`, with confidence 1 - `delta`.

    `confidence` [n] is the small model's, `draws` [n] decide as they do live (`cascade.draws`), and `disagrees` [n]
    says whose answers differ, the large one's on whole texts. The texts need no labels, and must have no part in the
    temperatures that their confidences come from. `cutoffs` are fixed before these texts are seen. Raises ValueError
    for arguments that make no sense.
    """
    sure, numbers, differ = (
        np.asarray(confidence, np.float64),
        np.asarray(draws, np.float64),
        np.asarray(disagrees, bool),
    )
    if sure.ndim != 1 or not sure.shape == numbers.shape == differ.shape:
        raise ValueError(
            f"needs as many confidences, draws and answers, got {sure.shape}, {numbers.shape}, {differ.shape}"
        )
    if not 0 < epsilon < 1 or not 0 < delta < 1 or not cutoffs:
        raise ValueError(f"epsilon and delta must be between 0 and 1, got {epsilon} and {delta}; cut-offs {cutoffs}")
    part = delta / len(cutoffs)
    certified: list[float] = []
    least, shown = 1.0, (0, 0)
    budget = part
    for cutoff in sorted(cutoffs, reverse=True):
        answered = numbers >= reroute_probability(sure, cutoff, slope)
        answers, wrong = int(answered.sum()), int((answered & differ).sum())
        chance = binomial_tail(wrong, answers, epsilon)
        if chance <= budget:
            certified.append(cutoff)
            shown = answers, wrong
            budget += part
        else:
            budget = part
        if not certified and chance <= least:
            least, shown = chance, (answers, wrong)
    return ConformalCutoffs(tuple(certified), *shown, math.ceil(math.log(part) / math.log1p(-epsilon)))
