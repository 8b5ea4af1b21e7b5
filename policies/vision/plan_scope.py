"""What of a queue is planned: queries that could still be in time, and of many batches not all (OTAS §III-D).

A plan's time must stay short, whatever clients send. A queue of up to HORIZON batches is planned as a whole. Of a
longer one those are, at most so many, that are due first of all that fit in beside each other: taken in the order of
what they gain per second at best, each if it can end in time at its fastest beside those taken before. So what waits in
vain is only what is worth less time than all that is kept, and who is due last does not wait for ever: what is due
before it runs, or is too late, and then its turn comes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from heapq import nsmallest
from typing import Generic, NamedTuple

import numpy as np

from pliant.policies.vision.slo_batching import Batch, Q
from pliant.policies.vision.token_profile import Floats, TokenProfile

HORIZON = 24
"""Batches that are planned together."""
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


def horizon(now: float, latency_s: Floats, gain: Floats, due: Sequence[float]) -> list[int]:
    """The batches to plan, in the order in which they are `due`; arrays are [batch, gamma], as for `best_plan`."""
    if len(due) <= HORIZON:
        return list(range(len(due)))
    per_s = (gain / latency_s).max(axis=1)
    room = np.array(due) - now
    fastest_s = latency_s.min(axis=1)
    fitting = []
    for batch in np.argsort(-per_s, kind="stable").tolist():
        behind = room[batch:]
        if per_s[batch] > 0 and fastest_s[batch] <= behind.min():
            behind -= fastest_s[batch]
            fitting.append(batch)
    return sorted(fitting)[:HORIZON]
