"""Which gammas are worth planning with, given the tasks in memory (OTAS §III-A, the task profiler)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pliant.deployments.vision.tasks import Tasks
from pliant.policies.vision.token_profile import dominated

logger = logging.getLogger("pliant")


class UsefulGammas:
    """Keeps plans from gammas than which another is neither slower nor less accurate, for every task in memory.

    All stay loaded and profiled: a task that comes later may make one useful, and so each change of the tasks is
    followed. `latency(gamma, rows)` is read once, for 1 to `most_rows` rows.
    """

    def __init__(
        self,
        service: str,
        gammas: Sequence[int],
        latency: Callable[[int, int], float],
        tasks: Tasks,
        most_rows: int,
    ) -> None:
        self._service = service
        self._gammas = tuple(gammas)
        self._latency_s = np.array([[latency(gamma, rows) for rows in range(1, most_rows + 1)] for gamma in gammas])
        self._tasks = tasks
        self._version = -1
        """Of the tasks for which `_dropped` holds."""
        self._dropped: Mapping[int, int] = {}

    def accuracy(self, task: object, gamma: int) -> float | None:
        """As `Tasks.accuracy`; None for a gamma that no plan needs."""
        return None if gamma in self.dropped() else self._tasks.accuracy(task, gamma)

    def dropped(self) -> Mapping[int, int]:
        """What no plan needs now, and the gamma that is better."""
        if self._version != self._tasks.version:
            self._version = self._tasks.version
            self._follow(dominated(self._gammas, self._latency_s, self._tasks.accuracies(self._gammas)))
        return self._dropped

    def _follow(self, dropped: Mapping[int, int]) -> None:
        for gamma, better in dropped.items():
            if gamma not in self._dropped:
                text = "%s: gamma %d is not used: gamma %d is at least as fast, and as accurate for every task"
                logger.info(text, self._service, gamma, better)
        for gamma in self._dropped.keys() - dropped.keys():
            logger.info("%s: gamma %d is used again, with the tasks that there are now", self._service, gamma)
        self._dropped = dropped
