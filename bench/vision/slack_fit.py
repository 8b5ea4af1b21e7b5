"""SlackFit, the policy of SuperServe (NSDI 2025), with a gamma in the place of a subnet.

Before it serves, choices (gamma, rows) are sorted into buckets of even widths by how long they take; each bucket stands
for its choice of the most rows, of these the one that takes longest, which is the most accurate. Then it always runs
the earliest deadline first, with the bucket that takes longest of those that its slack has time for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

import numpy as np

from pliant.policies.vision.slo_batching import Batch, Q
from pliant.policies.vision.token_adaptation import Step
from pliant.policies.vision.token_profile import TokenProfile


class _Choice(NamedTuple):
    seconds: float
    rows: int
    gamma: int


class SlackFitPolicy(Generic[Q]):
    """For a profile whose gammas are more accurate the longer they take, and that all tasks have."""

    def __init__(self, profile: TokenProfile, buckets: int) -> None:
        self._profile = profile
        self._choices = _of_buckets(profile, buckets)

    def arrived(self, query: Q) -> None:
        """The rate does not matter."""

    def plan(self, batches: Sequence[Batch[Q]], now: float) -> list[Step[Q]]:
        """One step, of the batch that is due first; none where nothing can be in time."""
        soonest = now + self._profile.shortest_s
        for batch in sorted(batches, key=lambda batch: batch.deadline):
            queries = sorted(
                (query for query in batch.queries if query.deadline >= soonest), key=lambda query: query.deadline
            )
            if queries:
                choice = self._fitting((queries[0].deadline - now) / self._profile.slowdown)
                return [Step(batch, choice.gamma, queries[: choice.rows])]
        return []

    def _fitting(self, slack_s: float) -> _Choice:
        return next((choice for choice in reversed(self._choices) if choice.seconds <= slack_s), self._choices[0])


def _of_buckets(profile: TokenProfile, buckets: int) -> list[_Choice]:
    """Of each bucket that has any; the first is what takes the least of all."""
    seconds = profile.latency_s / profile.slowdown
    every = [
        _Choice(float(seconds[place, rows - 1]), rows, gamma)
        for place, gamma in enumerate(profile.gammas)
        for rows in range(1, profile.most_rows + 1)
    ]
    least, most = min(every), max(every)
    edges = np.linspace(least.seconds, most.seconds, buckets + 1)[1:-1]
    best: dict[int, _Choice] = {}
    for choice in every:
        bucket = int(np.searchsorted(edges, choice.seconds))
        best[bucket] = max(best.get(bucket, choice), choice, key=lambda one: (one.rows, one.seconds))
    return sorted({least, *best.values()})
