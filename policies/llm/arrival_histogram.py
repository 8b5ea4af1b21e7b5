"""Which adapters will likely be asked for soon, from the times between their requests (Chameleon §4.1, Prefetching).

Each adapter has a histogram of the seconds between two of its requests, as the functions of a cloud have (Shahrad et
al. 2020). Given how long ago the last one was, it tells how probable the next one is within a horizon: of the gaps that
were longer than that, the share that ended within it. So a request that comes every minute is expected just before the
minute is over, and an adapter that is asked for all the time at any time.

Little is known of most adapters. Each histogram therefore starts from that of all adapters, which weighs as much as a
few gaps of its own; and old gaps count less and less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

A = TypeVar("A", bound=Hashable)

Floats = NDArray[np.float64]

_SHORTEST_S = 0.05
_PER_DOUBLING = 4
_EDGES = 22 * _PER_DOUBLING
"""Of gaps, in geometric steps up to two days."""
_OWN_AFTER = 4.0
"""Gaps after which an adapter's own weigh as much as everybody's."""
_NEVER = 0.1
"""Weight of a gap without end: whoever has been away for longer than ever before may not come back."""
_DECAY = 0.98
_DECAY_OF_ALL = 0.999


class ArrivalHistogram(Generic[A]):
    """Learns from requests when each adapter is asked for; of `adapters` at most, those of late.

    `now` is in seconds on any clock that does not run backwards.
    """

    def __init__(self, adapters: int = 4096) -> None:
        if adapters < 1:
            raise ValueError(f"adapters must be at least 1, got {adapters}")
        self._rows: OrderedDict[A, int] = OrderedDict()
        self._free = list(range(adapters))
        self._last: Floats = np.zeros(adapters)
        self._reaching: Floats = np.zeros((adapters, _EDGES + 1))
        """By adapter and edge, the weight of the gaps that were at least so long."""
        self._all: Floats = np.zeros(_EDGES + 1)

    def __len__(self) -> int:
        """Adapters that are remembered."""
        return len(self._rows)

    def observe(self, adapter: A, now: float) -> None:
        """A request for `adapter` came."""
        row = self._rows.get(adapter)
        if row is None:
            self._rows[adapter] = row = self._free.pop() if self._free else self._rows.popitem(last=False)[1]
            self._reaching[row] = 0
        else:
            edges = int(_position(now - self._last[row])) + 1
            for reaching, decay in ((self._reaching[row], _DECAY), (self._all, _DECAY_OF_ALL)):
                reaching *= decay
                reaching[:edges] += 1
        self._rows.move_to_end(adapter)
        self._last[row] = now

    def likely(self, now: float, horizon_s: float, least: float = 0.5) -> list[tuple[A, float]]:
        """The adapters that will be asked for within `horizon_s` with a probability of `least` or more, best first."""
        if not self._all[0]:
            return []
        rows = np.fromiter(self._rows.values(), np.intp, len(self._rows))
        ages = now - self._last[rows]
        reached, outlived = self._weight(rows, ages), self._weight(rows, ages + horizon_s)
        probabilities = 1 - outlived / reached
        adapters = list(self._rows)
        best = np.argsort(-probabilities, kind="stable")[: int((probabilities >= least).sum())]
        return [(adapters[index], float(probabilities[index])) for index in best]

    def _weight(self, rows: NDArray[np.intp], ages: Floats) -> Floats:
        """The weight of the gaps of `rows` that are at least `ages` long."""
        positions = _position(ages)
        edges = np.minimum(positions.astype(np.intp), _EDGES - 1)
        beyond = positions - edges
        prior = _OWN_AFTER / self._all[0] * self._all
        below, above = (self._reaching[rows, edge] + prior[edge] for edge in (edges, edges + 1))
        weight: Floats = below + beyond * (above - below) + _NEVER
        return weight


def _position(seconds: ArrayLike) -> Floats:
    """Where gaps lie among the edges, with their fraction of the way to the next."""
    doublings = np.log2(1 + np.asarray(seconds, np.float64) / _SHORTEST_S)
    position: Floats = np.minimum(_PER_DOUBLING * doublings, _EDGES)
    return position
