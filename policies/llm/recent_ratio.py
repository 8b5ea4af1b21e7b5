"""A ratio of two sums in which what was added lately counts most: seconds per step, tokens per second."""

from __future__ import annotations


class RecentRatio:
    """Σ numerators / Σ denominators; with each addition the earlier ones count `decay` (0 to 1) of what they did.

    `numerator` and `denominator` are what is assumed before the first addition; zero assumes nothing.
    """

    def __init__(self, decay: float, numerator: float = 0.0, denominator: float = 0.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, got {decay}")
        self._decay = decay
        self._numerator = numerator
        self._denominator = denominator

    def add(self, numerator: float, denominator: float) -> None:
        self._numerator = self._numerator * self._decay + numerator
        self._denominator = self._denominator * self._decay + denominator

    @property
    def value(self) -> float:
        """The ratio; 0 as long as nothing is known."""
        return self._numerator / self._denominator if self._denominator else 0.0
