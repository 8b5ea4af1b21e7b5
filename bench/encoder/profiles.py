"""Seconds that one request takes, by runtime and length: the models of Arlo's evaluation (§2, Figure 2)."""

from __future__ import annotations

from dataclasses import dataclass

from pliant.simulation.arrivals import Integers

STEP = 64
LONGEST = 512


@dataclass(frozen=True)
class Profile:
    """A model whose static runtimes get slower in steps of 64 tokens, and whose dynamic runtime runs any length.

    A static runtime takes a time that grows linearly with its max_length; the dynamic one a time that grows linearly
    with the length, through the inflations that the paper gives at both ends.
    """

    name: str
    shortest_s: float
    """Of a static runtime for 64 tokens."""
    longest_s: float
    """Of a static runtime for 512 tokens."""
    slo_s: float
    inflations: tuple[float, float] = (3.56, 1.22)
    """The dynamic runtime's time over that of the static one, at 64 and at 512 tokens."""

    def static_s(self, max_length: int) -> float:
        """Seconds that every request takes on a static runtime of `max_length` tokens."""
        steps = -(-max_length // STEP) - 1
        return self.shortest_s + (self.longest_s - self.shortest_s) * steps / (LONGEST // STEP - 1)

    def dynamic_s(self, length: float) -> float:
        """Seconds that a request of `length` tokens takes on the dynamic runtime."""
        short = self.shortest_s * self.inflations[0]
        long = self.longest_s * self.inflations[1]
        return short + (long - short) * (length - STEP) / (LONGEST - STEP)

    def mean_dynamic_s(self, lengths: Integers) -> float:
        """`dynamic_s` on average over requests of these lengths: that of their mean, because it is linear."""
        return self.dynamic_s(float(lengths.mean()))

    def static_table(self, max_length: int) -> list[float]:
        """`static_s` for each length from 0 to `max_length`."""
        return [self.static_s(max_length)] * (max_length + 1)

    def dynamic_table(self, max_length: int) -> list[float]:
        """`dynamic_s` for each length from 0 to `max_length`."""
        return [self.dynamic_s(length) for length in range(max_length + 1)]


BASE = Profile("Bert-Base", shortest_s=1.13e-3, longest_s=4.86e-3, slo_s=0.15, inflations=(3.56, 1.22))
LARGE = Profile("Bert-Large", shortest_s=1.8e-3, longest_s=9.45e-3, slo_s=0.45, inflations=(2.0, 1.22))
"""The paper gives the ratio, 5.25. The scale is ours: that at which its loads (250 requests/s a GPU, Table 4) can be
served; and so is the inflation at the short end: with more, DT could not serve the loads that the paper shows it with.
"""
