"""Which sizes of requests wait in a queue of their own, and how much memory each queue is due (Chameleon §4.2).

A request's weighted size combines its prompt, its predicted output and its adapter. K-means over the recent sizes finds
the classes, at most four; the cut-offs lie midway between neighbouring centroids. A class whose largest request takes S
bytes for D seconds on average, and of which λ arrive each second, needs a quota of S * D * (λ + 1 / SLO) bytes: μ =
quota / (S * D) of its requests can be served each second, and 1 / (μ - λ) seconds in the system must be within the SLO.

Beyond the paper, and beside it:

- The smallest sum of squares, by which the paper chooses K, is that of the largest K. Here the likelihood of classes
  is penalised, and a load that is all of a kind has one class.
- In one dimension K-means is solved exactly, by dynamic programming, not from random starts.
- There are only as many classes as the memory can be divided among so that each quota holds its largest request.
- Where the memory is less than what all classes need together, small requests get theirs first: they would else wait
  behind their own quota while large ones run.
- One request of exceptional length does not make all others look alike: maxima are the 99th percentiles.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

MOST_CLASSES = 4
WEIGHTS = (0.3, 0.5, 0.2)
"""A, B and C: how much prompt, output and adapter count in a weighted size."""

_SAMPLE = 2000
_LEAST_SAMPLE = 50
_RARELY_EXCEEDED = 0.99
_RESOLUTION = 500
"""Sizes are told apart in this many steps, which bounds the time that clustering takes."""
_LEAST_DURATION_S = 1e-6
_ALIKE = 0.01
"""Sizes that differ by about this much are all of a kind, however regular the difference."""
_LEAST_GAIN = 0.05
"""In log-likelihood per request: how much a further class must explain, as queues divide the memory."""


class QueueClass(NamedTuple):
    """The requests up to a weighted size, and the memory they are due."""

    cut_off: float
    """The greatest weighted size, infinite in the last class; the smaller ones belong to the class before."""
    quota: int
    """In bytes, of keys, values and adapters."""


def weighted_size(requests: ArrayLike, maxima: ArrayLike) -> Floats:
    """WRS, 0 to 1, of requests given by (prompt tokens, predicted tokens, adapter bytes) in the last of any dimensions.

    `maxima` are the three greatest values; what exceeds them counts as they do.
    """
    shares = np.asarray(requests, np.float64) / np.maximum(np.asarray(maxima, np.float64), 1)
    sizes: Floats = np.minimum(shares, 1) @ np.array(WEIGHTS)
    return sizes


def cut_offs_by_classes(sizes: ArrayLike, most: int = MOST_CLASSES) -> list[list[float]]:
    """For each number of classes from 1 to at most `most`, better ones first, the cut-offs between them.

    Better is a smaller criterion, of two that are equal the one with fewer classes. `sizes` are weighted sizes.
    """
    values, counts = np.unique(np.round(np.asarray(sizes, np.float64) * _RESOLUTION), return_counts=True)
    values, weights = values / _RESOLUTION, counts.astype(np.float64)
    found = []
    for starts in _k_means(values, weights, most):
        members = np.add.reduceat(weights, starts)
        centroids = np.add.reduceat(weights * values, starts) / members
        spread = weights @ np.square(values - np.repeat(centroids, np.diff([*starts, len(values)])))
        found.append((_criterion(float(spread), members), ((centroids[:-1] + centroids[1:]) / 2).tolist()))
    return [cut_offs for _, cut_offs in sorted(found, key=lambda choice: choice[0])]


class QueueClasses:
    """Learns from the requests that come and end which classes there are, and what each is due.

    `slo_s` is how many seconds a request may take from its arrival to its end. Classes follow the last `period_s`
    seconds, as far as they hold enough requests, and at most the last 2,000 requests. `now` is in seconds on any clock
    that does not run backwards. Until the first `learn` there is one class.
    """

    def __init__(self, slo_s: float, period_s: float = 300.0) -> None:
        if slo_s <= 0 or period_s <= 0:
            raise ValueError(f"slo_s and period_s must be positive, got {slo_s} and {period_s}")
        self._slo_s = slo_s
        self._period_s = period_s
        self._arrivals: deque[tuple[float, int, int, int, int]] = deque(maxlen=_SAMPLE)
        self._ends: deque[tuple[float, int, int, int]] = deque(maxlen=_SAMPLE)
        self._maxima: Floats = np.ones(3)
        self._cut_offs: list[float] = []
        self._arrived = 0
        self._learned_at: float | None = None
        self._learn_after = _LEAST_SAMPLE

    def observe(self, now: float, prompt: int, output: int, adapter_bytes: int, charge: int) -> None:
        """A request arrived, of so many tokens and predicted tokens, that takes `charge` bytes besides its adapter."""
        self._arrivals.append((now, prompt, output, adapter_bytes, charge))
        self._arrived += 1

    def ended(self, prompt: int, output: int, adapter_bytes: int, seconds: float) -> None:
        """A request, described as it was when it arrived, had its memory for `seconds`."""
        self._ends.append((seconds, prompt, output, adapter_bytes))

    def classify(self, prompt: int, output: int, adapter_bytes: int) -> int:
        """The index of the class, of those last learned, that such a request belongs to."""
        if not self._cut_offs:
            return 0
        return bisect_left(self._cut_offs, float(weighted_size((prompt, output, adapter_bytes), self._maxima)))

    def due(self, now: float) -> bool:
        """Whether it is time to learn: each period, and in the first whenever twice as many requests have arrived."""
        if self._learned_at is not None and now - self._learned_at >= self._period_s:
            return bool(self._arrivals)
        return self._learn_after <= self._arrived and self._learn_after <= _SAMPLE

    def learn(self, now: float, total: int) -> list[QueueClass]:
        """The classes from now on, small requests first; their quotas add up to `total` bytes (see `share_out`).

        Each quota is at least the largest request of its class that was observed, adapter included, provided that this
        is within `total`. What a class needs is what it must have to meet the SLO.
        """
        self._learned_at = now
        while self._learn_after <= self._arrived and self._learn_after <= _SAMPLE:
            self._learn_after *= 2
        while len(self._arrivals) > _LEAST_SAMPLE and self._arrivals[0][0] < now - self._period_s:
            self._arrivals.popleft()
        self._cut_offs = []
        if len(self._arrivals) < _LEAST_SAMPLE:
            return [QueueClass(math.inf, total)]

        arrivals = np.array(self._arrivals, np.float64)
        requests, largest = arrivals[:, 1:4], arrivals[:, 3] + arrivals[:, 4]
        self._maxima = np.quantile(requests, _RARELY_EXCEEDED, axis=0)
        sizes = weighted_size(requests, self._maxima)
        for cut_offs in cut_offs_by_classes(sizes):
            members = np.searchsorted(cut_offs, sizes)
            floors = [int(largest[members == index].max(initial=0)) for index in range(len(cut_offs) + 1)]
            if not cut_offs or (all(floors) and sum(floors) <= total):
                break
        rates = np.bincount(members) / max(now - float(arrivals[0, 0]), self._slo_s)
        needs = np.array(floors) * self._durations(cut_offs, sizes, members) * (rates + 1 / self._slo_s)
        self._cut_offs = cut_offs
        return list(map(QueueClass, [*cut_offs, math.inf], share_out(needs.tolist(), floors, total)))

    def _durations(self, cut_offs: list[float], sizes: Floats, members: NDArray[np.intp]) -> Floats:
        """The mean seconds of each class's requests; where none has ended, in proportion to their size."""
        classes = len(cut_offs) + 1
        mean_sizes = np.bincount(members, sizes) / np.bincount(members)
        if not self._ends:
            return self._slo_s * mean_sizes
        ends = np.array(self._ends, np.float64)
        ended_sizes = weighted_size(ends[:, 1:], self._maxima)
        ended = np.searchsorted(cut_offs, ended_sizes)
        counts, seconds = np.bincount(ended, minlength=classes), np.bincount(ended, ends[:, 0], classes)
        guesses = mean_sizes * seconds.sum() / max(float(ended_sizes.sum()), 1 / _RESOLUTION)
        return np.maximum(np.where(counts > 0, seconds / np.maximum(counts, 1), guesses), _LEAST_DURATION_S)


def share_out(needs: Sequence[float], floors: Sequence[int], total: int) -> list[int]:
    """`total` bytes among classes, small requests first, each of which has a positive need.

    All get what they need, and the rest is shared in proportion to that. If it is not enough, small requests get theirs
    first, so that in overload they still pass, and large ones what is left; but each class gets at least its floor.
    Should even the floors add up to more than `total`, the shares are in proportion to them.
    """
    wanted = [max(need, floor) for need, floor in zip(needs, floors, strict=True)]
    if sum(floors) > total:
        shares = [total * floor // sum(floors) for floor in floors]
    elif sum(wanted) <= total:
        shares = [int(total * want / sum(wanted)) for want in wanted]
    else:
        shares = []
        for index, want in enumerate(wanted):
            shares.append(int(min(want, total - sum(shares) - sum(floors[index + 1 :]))))
    shares[-1] += total - sum(shares)
    return shares


def _k_means(values: Floats, weights: Floats, most: int) -> list[list[int]]:
    """For 1, 2... clusters of rising, distinct values, where each begins so that the squared distances are least.

    Exact, in O(most * values²).
    """
    mass, moment, square = (np.concatenate(([0.0], np.cumsum(weights * values**power))) for power in range(3))
    # spread[i, j]: the squared distances of values i to j as one cluster; infinite for j < i.
    within = mass[1:] - mass[:-1, None]
    spread = np.where(
        within > 0,
        square[1:] - square[:-1, None] - np.square(moment[1:] - moment[:-1, None]) / np.where(within > 0, within, 1),
        np.inf,
    )
    # total[j]: the least of values 0 to j in so many clusters, another of which may begin at any i + 1.
    total, before = spread[0], []
    clusterings = [[0]]
    for _ in range(1, min(most, len(values))):
        choices = total[:-1, None] + spread[1:]
        before.append(choices.argmin(axis=0) + 1)
        total = choices.min(axis=0)
        starts, end = [], len(values) - 1
        for step in reversed(before):
            starts.append(int(step[end]))
            end = starts[-1] - 1
        clusterings.append([0, *reversed(starts)])
    return clusterings


def _criterion(spread: float, members: Floats) -> float:
    """The Bayesian information criterion, over 2, of normal classes of one variance with every request's class known.

    What it costs to say which class each request belongs to offsets what the split gains in a load without gaps: evenly
    spread sizes are as likely in K classes as in one. Two parameters per class, and the least gain, decide for one.
    """
    requests = float(members.sum())
    likelihood = requests / 2 * math.log(spread / requests + _ALIKE**2) - float(members @ np.log(members / requests))
    return likelihood + len(members) * (math.log(requests) + _LEAST_GAIN * requests)
