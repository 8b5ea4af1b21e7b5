"""What a second of the device is worth to queries that are yet to come: why not every batch gets the richest gamma.

A plan for the queued batches alone is myopic: when few wait, all of them have time for the richest gamma, and those who
come meanwhile wait. Algorithm 3 of OTAS (§III-D) therefore takes gamma from the rate by a table, and does not look at
the batch. Here the rate gives a price instead, and every batch is charged for its seconds; so one that earns much may
still take them, and one that earns little waits until there is time.

The price is that of a fluid. Of queries whose median time allowed is L, the n that wait and those that come in the next
L / 2 seconds share out L seconds; they are like those that came last. Each of these has a concave hull over (seconds,
utility * accuracy) of the gammas that its task has, in the batches that suit them best, and the hull's edges are what
can be bought for it: to be answered at all, then to be answered better. Sold are those that gain most per second, as
long as there is time, and the price is what the last of them gains. It is 0 where time suffices for the richest gammas.
Half of L is left as slack, so that a burst that those who wait can sit out costs nothing; if it lasts, n rises. And
half of the price is charged, as those who come are only guessed from those who came.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from statistics import median

import numpy as np

from pliant.policies.vision.plan_bound import slopes
from pliant.policies.vision.rate_to_gamma import RecentRate
from pliant.policies.vision.slo_batching import Query
from pliant.policies.vision.token_profile import Floats, TokenProfile

_MIX = 256
"""Queries, the last that came, which those to come are like."""
_CHARGED = 0.5
"""Of the price. More is too much when a burst ends, less too little when the load lasts."""


class TimePrice:
    """Learns from the queries that come; see the module. The rate is that of about the last `window_s` seconds."""

    def __init__(self, profile: TokenProfile, window_s: float = 0.5) -> None:
        self._profile = profile
        self._rate = RecentRate(window_s)
        row_s = profile.row_s() / profile.slowdown
        self._order = np.argsort(row_s).tolist()
        self._row_s = [0.0, *row_s[self._order].tolist()]
        self._hulls: dict[tuple[float, ...], Floats] = {}
        """By accuracies at each gamma; 0 where there are no prompts for it."""
        self._mix: deque[tuple[Hashable, float, float]] = deque(maxlen=_MIX)

    def arrived(self, query: Query) -> None:
        self._rate.add(query.arrival)
        self._mix.append((query.task, query.utility, query.deadline - query.arrival))

    def __call__(self, now: float, waiting: int) -> float:
        """Utility per second when `waiting` queries wait; 0 before the first came."""
        if not self._mix:
            return 0.0
        allowed_s = median(allowed for _, _, allowed in self._mix)
        queries = waiting + self._rate.value(now) * allowed_s / 2
        if not queries:
            return 0.0
        slowdown = self._profile.slowdown
        seconds = len(self._mix) * allowed_s / queries / slowdown
        per_s, needed_s = self._edges()
        order = np.argsort(-per_s)
        last = int(np.searchsorted(needed_s[order].cumsum(), seconds))
        return _CHARGED * float(per_s[order[last]]) / slowdown if last < len(order) else 0.0

    def _edges(self) -> tuple[Floats, Floats]:
        """Of all of the mix's hulls: utility per second, and seconds, as if nothing were slower than profiled."""
        utilities = defaultdict[Hashable, list[float]](list)
        for task, utility, _ in self._mix:
            utilities[task].append(utility)
        hulls = [(self._hull(task), earned) for task, earned in utilities.items()]
        per_s = [np.multiply.outer(earned, hull[:, 0]).ravel() for hull, earned in hulls]
        needed_s = [np.tile(hull[:, 1], len(earned)) for hull, earned in hulls]
        return np.concatenate(per_s), np.concatenate(needed_s)

    def _hull(self, task: Hashable) -> Floats:
        """Of a query of utility 1: its edges, the steepest first."""
        gain = np.nan_to_num(self._profile.utility([[(task, 1.0)]])[0]).tolist()
        known = tuple(gain)
        if known not in self._hulls:
            if len(self._hulls) >= _MIX:
                self._hulls.clear()
            self._hulls[known] = np.array(slopes(self._row_s, [0.0, *(gain[place] for place in self._order)]))
        return self._hulls[known].reshape(-1, 2)
