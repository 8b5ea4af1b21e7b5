"""Exact solver for the integer program of Arlo §3.3: which numbers of replicas per runtime cost the least latency.

Given the counts, equations 4-6 determine all else, so a dynamic program goes through the runtimes in rising length. Its
state is (replicas used, requests carried on to the next longer runtime, cost so far). Two things keep states few:

- *Prices* (a Lagrangian bound). If each replica cost a price instead of there being so many, then serving one request
  at runtime i would cost at least `own` = min over the load b of L_i(b) + price / b, and one that may be carried on at
  least `onward`, the least `own` from i on. Less the price of all replicas, that bounds every solution from below, at
  any price; of several prices, the highest bound counts. Equation 3 keeps floor(Q_i / M_i) * M_i requests at i.
- *Dominance.* A state that is better in none of the three is dropped: whatever the counts of the longer runtimes, fewer
  requests or more replicas there never cost more. That takes latencies which never fall as load rises; where one does,
  only states with equal replicas and requests are compared. Nothing else is assumed of latencies or capacities.

States whose bound exceeds a limit are dropped. The best solution within the limit is then optimal, so the limit starts
just above the bound and rises until there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FIRST_GAP = 1e-4
"""Of the lower bound, between it and the first limit."""
_GROWTH = 4.0
"""Of that gap from one limit to the next."""
_FEW_STATES = 300
"""Kept per runtime while the limit is sought; where they do not suffice, the solution found is the last limit."""
_MOST_STATES = 10_000
"""Kept per runtime at all."""
_ROUNDING = 1e-12
_SPREAD = np.array([0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.6, 3.0])
"""Prices that are tried on every state, over the one that bounds the whole problem best."""


@dataclass(frozen=True)
class Program:
    """The integer program: one entry per runtime, in rising length, and the number of replicas (equation 2).

    `latency[i, k]` is the mean latency at load capacity[i] * k / K, positive, k = 0..K; `floors` are the least counts
    (equations 3 and 7), at least 1 for the last runtime; they must fit.
    """

    capacity: Floats
    latency: Floats
    demand: Floats
    floors: Ints
    replicas: int

    @cached_property
    def steps(self) -> Floats:
        """Requests per period between two samples of `latency`."""
        steps: Floats = self.capacity / (self.latency.shape[1] - 1)
        return steps

    @cached_property
    def rising(self) -> bool:
        """Whether no latency falls as load rises."""
        return bool((np.diff(self.latency, axis=1) >= 0).all())

    @cached_property
    def slopes(self) -> Floats:
        """Latency per request of load from each sample on; beyond capacity the last slope, or 0 if that falls."""
        slopes = np.diff(self.latency, axis=1) / self.steps[:, None]
        return np.hstack((slopes, np.maximum(slopes[:, -1:], 0)))

    def latency_at(self, runtime: int, load: Floats) -> Floats:
        """Mean latency of a request on a replica of `runtime` that gets `load` requests per period."""
        step = self.steps[runtime]
        sample = np.minimum(load / step, self.latency.shape[1] - 1).astype(np.int64)
        latency: Floats = self.latency[runtime, sample] + (load - sample * step) * self.slopes[runtime, sample]
        return latency

    def cost(self, counts: Ints) -> tuple[float, float]:
        """The objective (equation 1), and the requests per period beyond the capacity of the last runtime."""
        cost, carry, last = 0.0, 0.0, len(counts) - 1
        for runtime, count in enumerate(counts):
            load = carry + self.demand[runtime]
            carry = max(0.0, load - count * self.capacity[runtime])
            served = load if runtime == last else load - carry
            if served:
                cost += float(self.latency_at(runtime, np.array(served / count)) * served)
        return cost, float(carry)


class Solution(NamedTuple):
    cost: float
    counts: Ints
    proven: bool


def solve(program: Program) -> Solution:
    """The best counts, proven so unless more than _MOST_STATES states would have had to be kept.

    Needs demand. Where latencies never fall, it is the one with most on the longest runtime of equally good ones.
    """
    prices = _Prices(program)
    lowest = prices.lowest
    gap = _FIRST_GAP * lowest
    while (found := _search(program, prices, lowest + gap, _FEW_STATES)) is None:
        gap *= _GROWTH
    if found.proven:
        return found
    return _search(program, prices, found.cost * (1 + _ROUNDING), _MOST_STATES) or found


class _Prices:
    """The lower bound on all costs to come, at several prices per replica; see the module."""

    def __init__(self, program: Program) -> None:
        self._program = program
        fixed = np.minimum(program.floors * program.capacity, program.demand)
        self._fixed, self._free = fixed, program.demand - fixed
        most = (self._free.sum() + fixed[-1]) / program.floors[-1]
        starts = program.steps[:, None] * np.arange(program.latency.shape[1])
        ends = np.hstack((starts[:, 1:], starts[:, -1:]))
        ends[-1, -1] = max(most, ends[-1, -1])
        self._starts, self._ends = starts, ends

        best = self._best_price()
        self.price = best * _SPREAD
        self.main = int(np.flatnonzero(_SPREAD == 1.0)[0])
        own, onward = self._rates(self.price)
        costs = own * self._fixed + onward * self._free
        nothing = np.zeros((len(_SPREAD), 1))
        self.rest = np.hstack((np.cumsum(costs[:, ::-1], axis=1)[:, ::-1], nothing))
        """[price, runtime]: the least cost of the demand of this runtime and all longer ones."""
        self.onward = onward
        """[price, runtime]: the least cost of one request more that is carried to this runtime."""

    @property
    def lowest(self) -> float:
        """No solution costs less."""
        nothing = np.zeros(1)
        return float(self.bound(0, nothing.astype(np.int64), nothing, nothing)[0])

    def bound(self, runtime: int, used: Ints, carry: Floats, cost: Floats) -> Floats:
        """The least cost of any solution that goes on from states in front of `runtime`."""
        left = self._program.replicas - used
        to_come = self.rest[:, runtime, None] + self.onward[:, runtime, None] * carry - self.price[:, None] * left
        bound: Floats = cost + to_come.max(axis=0)
        return bound

    def _rates(self, price: Floats) -> tuple[Floats, Floats]:
        """`own` and `onward`, each [price, runtime]; where latency rises, the best load is sqrt(price / slope)."""
        price = price[:, None, None]
        with np.errstate(divide="ignore"):
            load = np.clip(np.sqrt(price / np.maximum(self._program.slopes, 0)), self._starts, self._ends)
        rates = self._program.latency + self._program.slopes * (load - self._starts) + price / load
        own = rates.min(axis=2)
        return own, np.minimum.accumulate(own[:, ::-1], axis=1)[:, ::-1]

    def _best_price(self) -> float:
        """The price with the highest bound, which is concave in it: a grid that closes in."""
        program = self._program
        typical = float(program.demand @ program.latency[:, -1]) / program.replicas
        low, high = -9.0, 6.0
        for _ in range(4):
            exponents = np.linspace(low, high, 25)
            price = typical * 10**exponents
            own, onward = self._rates(price)
            best = int(np.argmax(own @ self._fixed + onward @ self._free - price * program.replicas))
            low, high = exponents[max(best - 1, 0)], exponents[min(best + 1, len(exponents) - 1)]
        return float(price[best])


class _States(NamedTuple):
    """States in front of a runtime, and where each came from."""

    used: Ints
    carry: Floats
    cost: Floats
    bound: Floats
    parent: Ints
    added: Ints
    """Replicas of the runtime before."""

    def take(self, chosen: Ints | NDArray[np.bool_]) -> _States:
        used, carry, cost, bound, parent, added = self
        return _States(used[chosen], carry[chosen], cost[chosen], bound[chosen], parent[chosen], added[chosen])


def _search(program: Program, prices: _Prices, limit: float, width: int) -> Solution | None:
    """The best solution that costs at most `limit`, None if there is none; proven if `width` states always sufficed."""
    none = np.zeros(1, dtype=np.int64)
    states = _States(none, np.zeros(1), np.zeros(1), np.zeros(1), none, none)
    history = []
    proven = True
    for runtime in range(len(program.demand) - 1):
        states = _undominated(_expand(program, prices, runtime, states, limit), program.rising)
        if len(states.used) > width:
            proven = False
            states = states.take(np.sort(np.argsort(states.bound, kind="stable")[:width]))
        if not len(states.used):
            return None
        history.append(states)

    load = states.carry + program.demand[-1]
    left = program.replicas - states.used
    costs = states.cost + program.latency_at(-1, load / left) * load
    best = int(np.argmin(costs))
    if costs[best] > limit:
        return None
    counts = [int(left[best])]
    state = best
    for states in reversed(history):
        counts.append(int(states.added[state]))
        state = int(states.parent[state])
    return Solution(float(costs[best]), np.array(counts[::-1]), proven)


def _expand(program: Program, prices: _Prices, runtime: int, states: _States, limit: float) -> _States:
    """All states behind `runtime` that its counts lead to from `states`, within the limit."""
    price, onward = prices.price[prices.main], prices.onward[prices.main, runtime : runtime + 2]
    rest = prices.rest[prices.main, runtime : runtime + 2]
    capacity, least = program.capacity[runtime], int(program.floors[runtime])
    room = program.replicas - states.used - int(program.floors[runtime + 1 :].sum())

    # Costs depend on the load alone, which many states share; at the main price, the group's cheapest speaks for all.
    carry, group, sizes = np.unique(states.carry, return_inverse=True, return_counts=True)
    members = np.argsort(group, kind="stable")
    firsts = np.cumsum(sizes) - sizes
    base = np.minimum.reduceat((states.cost + price * states.used)[members], firsts) - price * program.replicas
    load = carry + program.demand[runtime]
    spare = limit - base - rest[1] - load * min(program.latency[runtime].min(), onward[1])
    most = max(least, min(int(room.max()), int(spare.max() / price) + 1))
    counts = np.arange(least, most + 1)
    served = np.minimum(load[:, None], counts * capacity)
    added = program.latency_at(runtime, served / np.maximum(counts, 1)) * served
    left = load[:, None] - served
    bound = (base + rest[1])[:, None] + added + onward[1] * left + price * counts
    row, column = np.nonzero(bound <= limit)

    pair = np.repeat(np.arange(len(row)), sizes[row])
    place = np.arange(len(pair)) - np.repeat(np.cumsum(sizes[row]) - sizes[row], sizes[row])
    row, column = row[pair], column[pair]
    parent = members[firsts[row] + place]
    count = counts[column]
    used, cost, carried = states.used[parent] + count, states.cost[parent] + added[row, column], left[row, column]
    bounds = prices.bound(runtime + 1, used, carried, cost)
    behind = _States(used, carried, cost, bounds, parent, count)
    return behind.take((bounds <= limit) & (count <= room[parent]))


def _undominated(states: _States, rising: bool) -> _States:
    """The states that may lead to the best solution, by replicas used and then requests carried on."""
    states = states.take(np.lexsort((states.cost, states.carry, states.used)))
    differs = (np.diff(states.used) != 0) | (np.diff(states.carry) != 0)
    states = states.take(np.concatenate((np.ones(min(1, len(states.used)), dtype=bool), differs)))
    if not rising:
        return states
    used, row = np.unique(states.used, return_inverse=True)
    carry, column = np.unique(states.carry, return_inverse=True)
    cost = np.full((len(used) + 1, len(carry) + 1), np.inf)
    cost[row + 1, column + 1] = states.cost
    best = np.minimum.accumulate(np.minimum.accumulate(cost, axis=0), axis=1)
    return states.take(states.cost < np.minimum(best[row, column + 1], best[row + 1, column]))
