"""Seconds that one request takes, by runtime and length: the models of Arlo's evaluation (§2, Figure 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pliant.policies.encoder.batching import PaddedTimes
from pliant.simulation.arrivals import Integers

STEP = 64
LONGEST = 512
_SIZES = (1, 2, 4, 8, 16, 32)
"""Texts of a batch, as static runtimes have them."""
_MOST_INFLATED, _LEAST_INFLATED = 3.56, 1.22
"""The dynamic runtime's time over that of the static one, as far as they go (§2.2)."""


@dataclass(frozen=True)
class Profile:
    """A model whose static runtimes get slower in steps of 64 tokens, and whose dynamic runtime runs any length.

    A static runtime takes a time that grows linearly with its max_length. A batch takes as long as one text of as many
    tokens, since linear layers do not care whose they are; attention, which costs the one text more, is neglected.

    A dynamic runtime takes longer by a factor that falls with the length, from 3.56 to 1.22. The paper shows it in
    Figure 2, which its text does not have, but says what became of it: how fast the factor falls is set so that Arlo's
    mean latency is as far below DT's as in Figure 6, where little is queued.
    """

    name: str
    shortest_s: float
    """Of a static runtime for 64 tokens."""
    longest_s: float
    """Of a static runtime for 512 tokens."""
    slo_s: float
    fall: float
    """Tokens over which what the factor exceeds 1.22 by falls to a share of 1 / e."""

    def static_s(self, tokens: int) -> float:
        """Seconds that every batch takes on a static runtime of so many tokens, all texts together."""
        steps = -(-tokens // STEP) - 1
        return self.shortest_s + (self.longest_s - self.shortest_s) * steps / (LONGEST // STEP - 1)

    def inflation(self, length: int) -> float:
        """What the dynamic runtime takes for a text of `length` tokens, over what a static one of this length does."""
        return _LEAST_INFLATED + (_MOST_INFLATED - _LEAST_INFLATED) * math.exp(-max(0, length - 1) / self.fall)

    def dynamic_s(self, length: int, texts: int = 1) -> float:
        """Seconds that a batch takes on the dynamic runtime, padded to `length` tokens."""
        return self.static_s(max(1, length * texts)) * self.inflation(length)

    def mean_static_s(self, lengths: Integers) -> float:
        """`static_s` on average over requests of these lengths, each on the shortest runtime that it fits into."""
        return float(np.asarray(self.static_table(LONGEST))[lengths].mean())

    def static_table(self, longest: int) -> list[float]:
        """Seconds by length from 0 to `longest`, each on the shortest runtime that it fits into."""
        return [self.static_s(max(1, length)) for length in range(longest + 1)]

    def padded_table(self, max_length: int) -> list[float]:
        """Seconds by length from 0 to `max_length`, all on a runtime of `max_length` tokens."""
        return [self.static_s(max_length)] * (max_length + 1)

    def dynamic_table(self, max_length: int) -> list[float]:
        """`dynamic_s` for each length from 0 to `max_length`."""
        return [self.dynamic_s(length) for length in range(max_length + 1)]

    def padded_times(self, lengths: tuple[int, ...], most: int) -> PaddedTimes:
        """Of static runtimes for these lengths and for batches of up to `most` texts."""
        sizes = tuple(size for size in _SIZES if size <= most)
        table = tuple(tuple(self.static_s(size * length) for length in lengths) for size in sizes)
        return PaddedTimes(sizes, lengths, table)


BASE = Profile("Bert-Base", shortest_s=1.13e-3, longest_s=4.86e-3, slo_s=0.15, fall=30)
LARGE = Profile("Bert-Large", shortest_s=1.8e-3, longest_s=9.45e-3, slo_s=0.45, fall=38)
"""The paper gives the ratio, 5.25. The scale is ours: that at which its loads (250 requests/s a GPU, Table 4) can be
served."""
