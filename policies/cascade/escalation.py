"""When the smaller of two language models answers a prompt itself (beyond Tabi, which cascades classifiers).

The small model begins its answer; how likely it found its own first tokens says how sure it is. Of some labelled
prompts it is known which answers would be worse than the large model's, and what the small one's confidence was. A rule
says how many tokens to look at, what of them, and the cut-off above which the small model goes on.

How many of the labelled prompts a rule makes worse is binomial: the chance of so few, were the true share above `loss`,
is exact for any model, as long as these prompts and those to come are exchangeable. Cut-offs are tested as in
`conformal_cutoff`: from the most careful one on, each with its part of delta, and a success passes its part on.
Whichever of the certified rules is chosen, on the same prompts too, keeps the loss with probability 1 - delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pliant.message import message
from pliant.policies.cascade.conformal_cutoff import binomial_tail

Signal = Literal["mean", "least"]
"""Of the tokens' probabilities: their geometric mean, or the least."""

TOKENS = (1, 4, 16)
"""Of the small model's answer, that may be looked at before it is decided who answers."""
CUTOFFS = (0.99, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
"""Falling; with the last one the small model answers everything."""
_SIGNALS: tuple[tuple[int, Signal], ...] = tuple(
    (tokens, signal) for tokens in TOKENS for signal in ("mean", "least") if tokens > 1 or signal == "mean"
)
_LEAST_SAVED = 0.02
"""Of the large model's tokens: for less the small one need not begin every answer."""
_AS_GOOD = 0.01
"""Of the large model's tokens: for so few more that are saved no answer is held back longer."""


@message
class Rule(NamedTuple):
    """Whether the small model goes on."""

    tokens: int
    """Of its answer, that are looked at; fewer if it ends before."""
    signal: Signal
    cutoff: float

    def confidence(self, logprobs: Sequence[float]) -> float:
        """From 0 to 1, by the natural logarithms of the probabilities of the answer's first tokens; 0 without any."""
        if not (looked := logprobs[: self.tokens]):
            return 0.0
        return math.exp(sum(looked) / len(looked) if self.signal == "mean" else min(looked))

    def sure(self, logprobs: Sequence[float]) -> bool:
        """Whether the small model answers."""
        return self.confidence(logprobs) >= self.cutoff

    def __str__(self) -> str:
        looked = "its first token" if self.tokens == 1 else f"its first {self.tokens} tokens"
        return f"{self.signal} probability of {looked} >= {self.cutoff:g}"


class Answered(NamedTuple):
    """What both models made of one labelled prompt."""

    logprobs: Sequence[float]
    """The natural logarithms of the probabilities of the first tokens of the small model's answer, max(TOKENS) of them
    or all."""
    worse: bool
    """Whether the small model's answer is worse than the large one's."""
    large_tokens: int
    """Of the large one's answer."""


@message
class Escalation(NamedTuple):
    """Which rule serves, and on what grounds."""

    rule: Rule | None
    """None: nothing that is worth it could be certified, so the large model answers everything."""
    early: float
    """The share of prompts that the small model answers."""
    worse: float
    """The share of all whose answer is worse for it."""
    saved: float
    """The share of the large model's tokens that it need not compute."""
    prompts: int
    fewest: int
    """Prompts of which none would be worse that would certify a single cut-off with its part of delta."""


def escalation(answered: Sequence[Answered], loss: float, delta: float = 0.05) -> Escalation:
    """The rule that saves most of the large model's tokens, and makes at most `loss` of all answers worse.

    That holds with confidence 1 - `delta`, both between 0 and 1. Of rules that save about as much the one that looks
    at the fewest tokens is taken, as answers are held back for these. Raises ValueError for arguments that make no
    sense.
    """
    if not answered:
        raise ValueError("needs labelled prompts")
    if not 0 < loss < 1 or not 0 < delta < 1:
        raise ValueError(f"loss and delta must be between 0 and 1, got {loss} and {delta}")
    worse = np.array([one.worse for one in answered])
    tokens = np.array([one.large_tokens for one in answered], np.float64)
    part = delta / (len(_SIGNALS) * len(CUTOFFS))
    found: list[Escalation] = []
    fewest = math.ceil(math.log(part) / math.log1p(-loss))

    def seen(rule: Rule | None, early: NDArray[np.bool_]) -> Escalation:
        saved = float(tokens[early].sum() / max(1.0, tokens.sum()))
        return Escalation(rule, float(early.mean()), float((early & worse).mean()), saved, len(answered), fewest)

    for looked, signal in _SIGNALS:
        sure = np.array([Rule(looked, signal, 0.0).confidence(one.logprobs) for one in answered])
        for cutoff in certified(sure, worse, loss, part):
            found.append(seen(Rule(looked, signal, cutoff), sure >= cutoff))
    if max((one.saved for one in found), default=0.0) < _LEAST_SAVED:
        return seen(None, np.zeros(len(answered), bool))
    most = max(one.saved for one in found)
    return min(
        (one for one in found if one.saved >= most - _AS_GOOD),
        key=lambda one: (one.rule.tokens if one.rule else 0, -one.saved, one.worse),
    )


def certified(confidence: ArrayLike, worse: ArrayLike, loss: float, part: float) -> list[float]:
    """The cut-offs, falling, that make at most `loss` of all answers worse, each with its `part` of delta.

    `confidence` [n] is the small model's, and `worse` [n] whose answers are.
    """
    sure, bad = np.asarray(confidence, np.float64), np.asarray(worse, bool)
    found: list[float] = []
    budget = part
    for cutoff in CUTOFFS:
        if binomial_tail(int((bad & (sure >= cutoff)).sum()), len(sure), loss) <= budget:
            found.append(cutoff)
            budget += part
        else:
            budget = part
    return found
