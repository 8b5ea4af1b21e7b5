"""How long an answer will be, learned from those that have ended (Chameleon §4.2 asks a proxy model for it).

What is known of a request is its adapter and how long its prompt is. Both together, the prompt's length more or less
finely, form contexts from the general to the special: all requests, the adapter's, those with prompts of such a length,
the adapter's with prompts of such a length. Each context counts the lengths of its answers. A special context starts
from what the more general ones predict, and adds its own counts; how far it is trusted depends on whether it has
predicted the answers so far better than they did. So an adapter whose answers are like all others' costs nothing in
accuracy, and one with its own ways is known after a few answers.

The prediction is the median: as often too short as too long, mostly in the right class, and right under a limit too, as
the median of lengths that are cut off is the median cut off.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pliant.policies.llm.recent_ratio import RecentRatio

A = TypeVar("A", bound=Hashable)
A_contra = TypeVar("A_contra", bound=Hashable, contravariant=True)

Floats = NDArray[np.float64]

_PER_DOUBLING = 4
_BINS = 16 * _PER_DOUBLING + 1
"""Of lengths, in geometric steps; the last takes what is longer."""
_NEIGHBOURS = (0.25, 0.5, 0.25)
"""How an answer is counted in its bin and those beside it."""
_OWN_AFTER = 4.0
"""Answers after which a context's own counts weigh as much as what it started from."""
_DECAY = 0.995
_MOST_TRUST = 5.0
_ACCURACY_DECAY = 0.999


class LengthPredictor(Protocol[A_contra]):
    """Predicts the lengths of answers; `adapter` is None for the base model, all lengths are in tokens."""

    def predict(self, adapter: A_contra | None, prompt: int, most: int) -> int:
        """The likely length, 1 to `most`, of the answer to a prompt of so many tokens."""
        ...

    def observe(self, adapter: A_contra | None, prompt: int, tokens: int, predicted: int) -> None:
        """An answer ended after `tokens`; it was once predicted to have `predicted`."""
        ...

    @property
    def accuracy(self) -> float:
        """The share of late predictions within the right class: from a power of two up to the next."""
        ...

    @property
    def error(self) -> float:
        """Of late predictions, the mean of |predicted - real| / real."""
        ...


class OutputLengths(Generic[A]):
    """Learns online; a `LengthPredictor`. Remembers at most `contexts` contexts, those of late."""

    def __init__(self, contexts: int = 8192) -> None:
        if contexts < 1:
            raise ValueError(f"contexts must be at least 1, got {contexts}")
        self._most_contexts = contexts
        self._contexts: OrderedDict[Hashable, _Context] = OrderedDict()
        self._right = RecentRatio(_ACCURACY_DECAY)
        self._error = RecentRatio(_ACCURACY_DECAY)

    def __len__(self) -> int:
        """Contexts that are remembered."""
        return len(self._contexts)

    def predict(self, adapter: A | None, prompt: int, most: int) -> int:
        """The median length, 1 to `most`, of the answer to a prompt of so many tokens."""
        likely = _UNKNOWN
        for name in _names(adapter, prompt):
            context = self._contexts.get(name)
            if context is not None:
                likely = context.refine(likely)
        return max(1, min(most, round(_median(likely))))

    def observe(self, adapter: A | None, prompt: int, tokens: int, predicted: int) -> None:
        """An answer of at least one token ended; it was once predicted to have `predicted`."""
        if tokens < 1:
            raise ValueError(f"an answer has at least 1 token, got {tokens}")
        self._right.add(tokens.bit_length() == predicted.bit_length(), 1)
        self._error.add(abs(predicted - tokens) / tokens, 1)
        bin_ = min(round(_PER_DOUBLING * math.log2(tokens)), _BINS - 1)
        likely = _UNKNOWN
        for name in _names(adapter, prompt):
            context = self._contexts.setdefault(name, _Context())
            self._contexts.move_to_end(name)
            refined = context.refine(likely)
            context.learn(bin_, likely)
            likely = refined
        while len(self._contexts) > self._most_contexts:
            self._contexts.popitem(last=False)

    @property
    def accuracy(self) -> float:
        """The share of late predictions within the right class: from a power of two up to the next."""
        return self._right.value

    @property
    def error(self) -> float:
        """Of late predictions, the mean of |predicted - real| / real."""
        return self._error.value


class _Context:
    """The lengths of the answers to requests of one kind."""

    __slots__ = ("_counts", "_total", "_trust")

    def __init__(self) -> None:
        self._counts: Floats = np.zeros(_BINS)
        self._total = 0.0
        self._trust = 0.0
        """Logarithm of how many times likelier than by the more general ones the answers were by its own counts."""

    def refine(self, general: Floats) -> Floats:
        """What is likely here, by bin, given what is likely by the more general contexts."""
        trusted = 1 / (1 + math.exp(-self._trust))
        return trusted * self._own(general) + (1 - trusted) * general

    def learn(self, bin_: int, general: Floats) -> None:
        """An answer ended, of which the more general contexts thought what they did."""
        gained = math.log(self._own(general)[bin_] / general[bin_])
        self._trust = max(-_MOST_TRUST, min(_MOST_TRUST, self._trust + gained))
        self._counts *= _DECAY
        self._total = self._total * _DECAY + 1
        for neighbour, share in zip((bin_ - 1, bin_, bin_ + 1), _NEIGHBOURS, strict=True):
            self._counts[max(0, min(_BINS - 1, neighbour))] += share

    def _own(self, general: Floats) -> Floats:
        own: Floats = (self._counts + _OWN_AFTER * general) / (self._total + _OWN_AFTER)
        return own


_UNKNOWN: Floats = np.full(_BINS, 1 / _BINS)


def _names(adapter: Hashable, prompt: int) -> tuple[Hashable, ...]:
    """The contexts that a request belongs to, general ones first."""
    doublings = math.log2(max(prompt, 1))
    octave, quarter, sixteenth = int(doublings), int(4 * doublings), int(16 * doublings)
    return (
        (),
        ("adapter", adapter),
        ("octave", octave),
        ("quarter", quarter),
        ("sixteenth", sixteenth),
        ("octave", octave, adapter),
        ("quarter", quarter, adapter),
    )


def _median(likely: Floats) -> float:
    """In tokens, with the lengths of a bin spread evenly over it."""
    cumulative = np.cumsum(likely)
    half = cumulative[-1] / 2
    bin_ = int(np.searchsorted(cumulative, half))
    within = (half - (cumulative[bin_] - likely[bin_])) / likely[bin_]
    return float(2 ** ((bin_ - 0.5 + within) / _PER_DOUBLING))
