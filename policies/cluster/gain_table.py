"""The best gain of some services by what they may take together: a dynamic program, exact for gains of any form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.policies.cluster.budget import Floats, Group, Shape

Counts = NDArray[np.int64]


class _Step(NamedTuple):
    """Of one group, by what it and the groups before it may take."""

    choice: Counts
    counts: list[list[Counts]]
    """For each alternative and claim: the replicas that are best."""


class GainTable:
    """For budgets from 0 to `budget`, in units of which a replica of a shape takes `size(shape)`."""

    def __init__(self, groups: Sequence[Group], budget: int, size: Callable[[Shape], int]) -> None:
        self.best: Floats = np.zeros(budget + 1)
        """By budget; minus infinity where the least replicas do not fit."""
        self._groups = groups
        self._size = size
        self._steps: list[_Step] = []
        for group in groups:
            gained, counts = [], []
            for gains in group.alternatives:
                table, taken = self.best, []
                for claim, gain in zip(group.claims, gains, strict=True):
                    table, count = _with_claim(table, claim.net(gain), size(claim.shape))
                    taken.append(count)
                gained.append(table)
                counts.append(taken)
            stacked = np.stack(gained)
            self.best = stacked.max(axis=0)
            self._steps.append(_Step(stacked.argmax(axis=0), counts))

    def split(self, budget: int) -> tuple[dict[str, int], list[int]]:
        """The replicas that gain the most, and the alternative of each group."""
        replicas: dict[str, int] = {}
        choices: list[int] = []
        for group, step in zip(reversed(self._groups), reversed(self._steps), strict=True):
            choice = int(step.choice[budget])
            choices.append(choice)
            for claim, counts in zip(reversed(group.claims), reversed(step.counts[choice]), strict=True):
                replicas[claim.name] = int(counts[budget])
                budget -= replicas[claim.name] * self._size(claim.shape)
        return replicas, choices[::-1]


def _with_claim(before: Floats, net: Floats, size: int) -> tuple[Floats, Counts]:
    """The table with one more claim, of `size` a replica, and how many replicas it gets."""
    useful = int(net.argmax())  # no more than that ever gains more
    if size == 0:
        return before + net[useful], np.full(len(before), useful)
    table = np.full(len(before), -np.inf)
    counts = np.zeros(len(before), np.int64)
    for count in range(min(useful, (len(before) - 1) // size) + 1):
        if net[count] == -np.inf:
            continue
        gained = before[: len(before) - count * size] + net[count]
        better = gained > table[count * size :]
        table[count * size :][better] = gained[better]
        counts[count * size :][better] = count
    return table, counts
