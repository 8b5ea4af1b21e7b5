"""A trace's queries, and what became of them: the paper's four types, and what they earned (OTAS §V)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pliant.simulation.arrivals import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One image; `chance`, from 0 to 1, is the accuracy from which on the answer to it is right."""

    index: int
    arrival: float
    deadline: float
    utility: float
    task: str
    chance: float


class Fate(IntEnum):
    """The paper's type of a query."""

    RIGHT = 1
    WRONG = 2
    LATE = 3
    EVICTED = 4


class Ran(NamedTuple):
    """A batch that was computed."""

    gamma: int
    """Or which model."""
    rows: int
    right: float
    """Share of its rows."""


class Outcome:
    """Fates of queries; all are evicted unless they are said to have been answered."""

    def __init__(self, queries: Sequence[Query]) -> None:
        self._arrivals = np.array([query.arrival for query in queries])
        self._utilities = np.array([query.utility for query in queries])
        self._fates = np.full(len(queries), Fate.EVICTED, np.int8)
        self.batches: list[Ran] = []
        self.expected = 0.0
        """Utility times accuracy, of the answers in time: `utility` without the luck."""

    def ran(self, queries: Sequence[Query], gamma: int, accuracies: Sequence[float], ended: float) -> None:
        """A batch; `accuracies` are those of its queries' tasks. Raises ValueError if one was answered before."""
        places = [query.index for query in queries]
        if (self._fates[places] != Fate.EVICTED).any():
            raise ValueError("a query is answered twice")
        right = np.array([query.chance for query in queries]) < accuracies
        late = np.array([query.deadline for query in queries]) < ended
        self._fates[places] = np.where(late, Fate.LATE, np.where(right, Fate.RIGHT, Fate.WRONG))
        self.expected += float(np.where(late, 0.0, self._utilities[places]) @ accuracies)
        self.batches.append(Ran(gamma, len(queries), float(right.mean())))

    @property
    def utility(self) -> float:
        """Of the right answers in time."""
        return float(self._earned.sum())

    @property
    def offered(self) -> float:
        """What all queries together would have earned."""
        return float(self._utilities.sum())

    def share(self, fate: Fate) -> float:
        """Of all queries."""
        return float((self._fates == fate).mean())

    def gammas(self) -> dict[int, float]:
        """Share of each gamma, or model, in the rows that were computed."""
        rows: Counter[int] = Counter()
        for batch in self.batches:
            rows[batch.gamma] += batch.rows
        return {gamma: number / rows.total() for gamma, number in rows.items()}

    def blocks(self, number: int) -> list[float]:
        """Utility of the queries that arrived in each of `number` spans of the trace, of the same length."""
        return [float(self._earned[span].sum()) for span in self._spans(number)]

    def shares(self, fate: Fate, number: int) -> list[float]:
        """The share in each such span."""
        return [float((self._fates[span] == fate).mean()) for span in self._spans(number)]

    def cumulated(self, seconds: Floats) -> Floats:
        """Utility of the queries that arrived until each of these moments."""
        total = np.concatenate(([0.0], self._earned.cumsum()))
        return np.asarray(total[np.searchsorted(self._arrivals, seconds)])

    @property
    def _earned(self) -> Floats:
        return np.where(self._fates == Fate.RIGHT, self._utilities, 0.0)

    def _spans(self, number: int) -> list[slice]:
        edges = np.searchsorted(self._arrivals, np.linspace(0, np.ceil(self._arrivals[-1]), number + 1))
        return [slice(*edge) for edge in pairwise(edges.tolist())]
