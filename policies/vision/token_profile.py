"""What each gamma costs and gives, and which no plan needs (OTAS §III-A, the task profiler).

The paper sums sample-level latencies. A batch runs in one forward pass, so that here it has the latency of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class TokenProfile:
    """Latency of a batch by gamma and size, and accuracy by task and gamma.

    `latency(gamma, rows)` is in seconds for 1 to `most_rows` rows, infinite where the memory does not suffice (equation
    1c), and read once; `accuracy(task, gamma)` is from 0 to 1, None where the task has no such prompts, and read anew
    whenever it is needed, so that tasks may come and go. Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        gammas: Iterable[int],
        latency: Callable[[int, int], float],
        accuracy: Callable[[Hashable, int], float | None],
        most_rows: int = 64,
    ) -> None:
        self.gammas = tuple(sorted(set(gammas)))
        """Tokens added (or, below 0, merged) per layer, rising."""
        if not self.gammas or most_rows < 1:
            raise ValueError(f"needs a gamma and a row at least, got {self.gammas} and most_rows {most_rows}")
        self.most_rows = most_rows
        rows = range(1, most_rows + 1)
        seconds = np.array([[latency(gamma, n) for n in rows] for gamma in self.gammas], np.float64)
        if not (seconds[:, 0] < np.inf).any() or not (seconds > 0).all():
            raise ValueError(f"latencies must be positive and one row must fit, got {seconds[:, 0]} s for one row")
        self._seconds = seconds
        self._accuracy = accuracy
        self.slowdown = 1.0
        """What latencies are of late, over what was profiled: whoever measures them may change it."""

    @property
    def latency_s(self) -> Floats:
        """[gamma, rows - 1], as they are of late."""
        seconds: Floats = self._seconds * self.slowdown
        return seconds

    @property
    def shortest_s(self) -> float:
        """No batch takes less."""
        return float(self.latency_s.min())

    def latency(self, gamma: int, rows: int) -> float:
        """Seconds. Raises ValueError for a gamma, or IndexError for rows, that were not profiled."""
        if not 1 <= rows <= self.most_rows:
            raise IndexError(f"a batch has 1 to {self.most_rows} rows, got {rows}")
        return float(self.latency_s[self.gammas.index(gamma), rows - 1])

    def utility(self, batches: Iterable[Iterable[tuple[Hashable, float]]]) -> Floats:
        """What batches of queries, (task, utility) each, earn: the sum of utilities times accuracies, [batch, gamma].

        NaN where one of a batch's tasks lacks the gamma.
        """
        accuracies: dict[Hashable, Floats] = {}
        rows = []
        for queries in batches:
            of_task: dict[Hashable, float] = {}
            for task, utility in queries:
                of_task[task] = of_task.get(task, 0.0) + utility
            row = np.zeros(len(self.gammas))
            for task, utility in of_task.items():
                if task not in accuracies:
                    known = (self._accuracy(task, gamma) for gamma in self.gammas)
                    accuracies[task] = np.array([np.nan if accuracy is None else accuracy for accuracy in known])
                row += utility * accuracies[task]
            rows.append(row)
        return np.array(rows)

    def row_s(self) -> Floats:
        """Seconds per row at each gamma, in the batches that suit it best: one over its greatest throughput."""
        per_row: Floats = (self.latency_s / np.arange(1, self.most_rows + 1)).min(axis=1)
        return per_row


def dominated(gammas: Sequence[int], latency_s: Floats, accuracy: Floats) -> dict[int, int]:
    """Each useless gamma with one that makes it useless and is not useless itself, in the order of `gammas`.

    That one is at least as fast in `latency_s` [gamma, rows], whatever the rows, and at least as accurate in `accuracy`
    [task, gamma] for every task; NaN there means that the task lacks the gamma. Of equals the one nearest to 0 stays.
    Without tasks nobody knows, and none is useless.
    """
    if not len(accuracy):
        return {}
    known = np.nan_to_num(accuracy, nan=-1.0)
    replaces = _at_most(latency_s) & _at_most(-known.T)
    nearer = np.array([[(abs(one), one) < (abs(other), other) for other in gammas] for one in gammas])
    beats = replaces & (nearer | ~replaces.T)
    useful: NDArray[np.bool_] = ~np.any(beats, axis=0)
    return {
        gamma: gammas[int(np.argmax(beats[:, index] & useful))]
        for index, gamma in enumerate(gammas)
        if not useful[index]
    }


def _at_most(costs: Floats) -> NDArray[np.bool_]:
    """Whether row a of `costs` exceeds row b nowhere, [a, b]."""
    return np.array([(row <= costs).all(axis=1) for row in costs])
