"""What a decode step takes by how many answers are live in it, learned from steps as they come."""

from __future__ import annotations

_KEPT = 0.98
"""Of what is known, by each observation."""
_SPREAD = 0.05
"""Of their mean, by which numbers of rows must vary to tell rows from steps."""


class StepCost:
    """`step_s + row_s * rows`, the line of least squares through recent steps, neither part below 0.

    While all recent steps had about the same rows, a row costs what it did when rows last varied; before they ever did,
    nothing beside its step, so that at least what was seen is predicted right.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        self._slope = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def observe(self, rows: float, seconds: float) -> None:
        """A step with `rows` answers took `seconds`. Raises ValueError unless both are positive."""
        if not (rows > 0 and seconds > 0):
            raise ValueError(f"rows and seconds must be positive, got {rows} and {seconds}")
        self._weight = _KEPT * self._weight + 1
        self._rows = _KEPT * self._rows + rows
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + rows * rows
        self._products = _KEPT * self._products + rows * seconds
        mean, mean_s = self._rows / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean * mean
        if variance >= (_SPREAD * mean) ** 2:
            self._slope = max(0.0, (self._products / self._weight - mean * mean_s) / variance)

    @property
    def row_s(self) -> float:
        """More, for each live answer; 0 if nothing is known."""
        return min(self._slope, self._seconds / self._rows) if self.known else 0.0

    @property
    def step_s(self) -> float:
        """Of a step without rows; 0 if nothing is known."""
        return max(0.0, (self._seconds - self.row_s * self._rows) / self._weight) if self.known else 0.0
