"""Which queries of a batch could still be in time, given the gammas that their tasks have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from heapq import nsmallest
from typing import Generic, NamedTuple

import numpy as np

from pliant.policies.vision.slo_batching import Batch, Q
from pliant.policies.vision.token_profile import Floats, TokenProfile

_MOST = 256
"""Batches that are looked at, so that the longest queue takes no more time than this."""


class Queued(NamedTuple, Generic[Q]):
    """A batch, and those of its queries that may run."""

    due: float
    """When the first of them is."""
    batch: Batch[Q]
    queries: Sequence[Q]


def runnable(profile: TokenProfile, latency_s: Floats, batches: Iterable[Batch[Q]], now: float) -> list[Queued[Q]]:
    """Batches in the order in which they are due, with the queries that would be in time if their batch were next.

    `latency_s` is [gamma, rows - 1] with the gammas of `profile`, infinite for those that are not to be used. A batch
    runs with a gamma that all of its tasks have: if they have none in common, those whose deadlines are the latest are
    kept together. What would be late even with the fastest such gamma is left out, so that it holds up no others; a
    batch of which nothing is left is left out, too. Of more than _MOST batches, the first are looked at.
    """
    unused = frozenset(np.flatnonzero(np.isinf(latency_s[:, 0])).tolist())

    @cache
    def lacking(task: Hashable) -> frozenset[int]:
        accuracies = profile.utility([[(task, 1.0)]])[0]
        return unused.union(np.flatnonzero(np.isnan(accuracies)).tolist())

    @cache
    def fastest_s(without: frozenset[int]) -> list[float]:
        left: list[float] = np.delete(latency_s, sorted(without), axis=0).min(axis=0, initial=np.inf).tolist()
        return left

    def of(batch: Batch[Q]) -> Queued[Q]:
        without = frozenset[int]().union(*map(lacking, {query.task for query in batch.queries}))
        if now + fastest_s(without)[len(batch) - 1] <= batch.deadline:
            return Queued(batch.deadline, batch, batch.queries)
        together: list[Q] = []
        without, most = frozenset(), 0
        for query in sorted(batch.queries, key=lambda query: query.deadline, reverse=True):
            both = without | lacking(query.task)
            if len(both) == len(latency_s):
                continue
            together.append(query)
            without = both
            if now + fastest_s(without)[len(together) - 1] <= query.deadline:
                most = len(together)
        in_time = together[:most][::-1]
        return Queued(in_time[0].deadline if in_time else batch.deadline, batch, in_time)

    queued = map(of, nsmallest(_MOST, batches, key=lambda batch: batch.deadline))
    return sorted((entry for entry in queued if entry.queries), key=lambda entry: entry.due)
