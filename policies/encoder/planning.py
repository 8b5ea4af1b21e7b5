"""When to allocate runtimes anew, and for which demand (Arlo §3.3): what the live planner and the simulator share.

The caller runs `due`, and when that gives a reason, `problem` → `solve` (anywhere: it shares nothing) → `adopt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.policies.encoder.configurations import Configuration, Placement, ResidentRuntime, place
from pliant.policies.encoder.demand import LengthDemand, Snapshot
from pliant.policies.encoder.runtime_allocation import Allocation, RuntimeClass, allocate, runtime_class

Reason = Literal["start", "replicas", "lengths", "shift", "period"]

_FIRST_REQUESTS = 100
_FIRST_S = 5.0
"""What must have been seen before the first plan, or else a whole period; until then replicas hold what they do."""
_MOST_LOAD = 0.95
"""Of the replicas' time; demand beyond is left out of plans."""
_UNSETTLED_S = 10.0
"""A shift is noticed within this time, or not at all."""


class Residency(NamedTuple):
    """What replicas have room for; without it each holds one runtime, as in the paper."""

    memory_mb: Mapping[int, float]
    """That a runtime of each max_length takes, beside the weights."""
    budget_mb: float
    """Of a replica, for its runtimes."""


class Problem(NamedTuple):
    """What `solve` needs: runtimes in rising length, requests per SLO period for each, and the replicas there are."""

    classes: tuple[RuntimeClass, ...]
    demand: tuple[float, ...]
    replicas: int
    excess: float
    """Requests per SLO period that were left out of `demand`, because the replicas cannot answer them in time."""
    snapshot: Snapshot
    residency: Residency | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the replicas should hold, and why."""

    version: int
    counts: dict[int, int]
    """Replicas by the length at which they are at home: the max_length of their runtime, if they hold one."""
    configurations: dict[Configuration, int]
    """Replicas by what they hold."""
    reason: Reason
    demand: dict[int, float]
    """Requests per second for which each max_length is the shortest that fits."""
    excess: float
    """Requests per second, more than these, that the replicas cannot answer in time."""
    solution: Allocation | Placement

    @property
    def predicted(self) -> dict[str, float]:
        """For people: the mean latency, or the greatest load of a replica and the least that it could be."""
        match self.solution:
            case Allocation(latency_s=latency_s):
                return {"predicted_latency_s": round(latency_s, 4)}
            case Placement(load=load, bound=bound):
                return {"predicted_load": round(load, 4), "least_load": round(bound, 4)}


def even_plan(lengths: Sequence[int], replicas: int) -> tuple[int, ...]:
    """The max_length that each replica, by rank, should hold as long as demand is not known.

    Rank 0 holds the longest, so that every text can be served from the first replica on. Each further round of ranks
    goes through all lengths once, so their counts differ by at most one; within a round each rank falls into the middle
    of a gap that the earlier ranks left (van der Corput's order), so a few replicas already span the whole range. More
    replicas never change what the earlier ranks hold.

    Raises ValueError when there is no length to hold or `replicas` is negative.
    """
    if not lengths or replicas < 0:
        raise ValueError(f"needs at least one length and no negative number of replicas, got {lengths} and {replicas}")
    falling = sorted(set(lengths), reverse=True)
    bits = (len(falling) - 1).bit_length()
    order = sorted(range(len(falling)), key=lambda index: f"{index:0{bits}b}"[::-1])
    return tuple(falling[order[rank % len(falling)]] for rank in range(replicas))


def solve(problem: Problem) -> Allocation | Placement:
    """The optimal allocation (Arlo §3.3, equations 1-7), or which sets of runtimes to hold (see `configurations`).

    Raises ValueError when a replica has no room for one of the runtimes.
    """
    if problem.residency is None:
        return allocate(problem.classes, problem.demand, problem.replicas)
    memory_mb, budget_mb = problem.residency
    runtimes = [
        ResidentRuntime(each.max_length, 1 / each.capacity, memory_mb[each.max_length]) for each in problem.classes
    ]
    return place(runtimes, problem.demand, problem.replicas, budget_mb)


class Planner:
    """Plans anew every `period_s`, and at once when demand, the replicas or the lengths that they can hold change.

    A plan that was made from little is made anew when as much again has been seen, so plans come at 10 s, 20 s, 40 s...
    at first.

    Demand is the mean over the last period, or its `quantile` over the seconds of it (beyond the paper: averages hide
    bursts). Times are in seconds on any one clock. With a `residency` replicas hold sets of runtimes.
    """

    def __init__(
        self,
        longest: int,
        slo_s: float,
        period_s: float = 120.0,
        quantile: float | None = None,
        residency: Residency | None = None,
    ) -> None:
        self.residency = residency
        """As it is known by now."""
        self._demand = LengthDemand(longest, window_s=period_s)
        self._slo_s = slo_s
        self._period_s = period_s
        self._quantile = quantile
        self._planned_at = self._planned_from_s = 0.0
        self._snapshot: Snapshot | None = None
        self.plan: Plan | None = None

    def observe(self, now: float, counts: Mapping[int, int]) -> None:
        """`counts` requests, by length in tokens, arrived since the last call."""
        self._demand.add(now, counts)

    def histogram(self, now: float) -> NDArray[np.int64]:
        """The requests of the last period by length in tokens."""
        return self._demand.histogram(now)

    def due(self, now: float, replicas: int, lengths: tuple[int, ...]) -> Reason | None:
        """Why to plan now, for `replicas` that can hold `lengths`; None when the plan may stand.

        When demand has shifted, what arrived before is forgotten.
        """
        if not replicas:
            return None
        seen = int(self.histogram(now).sum())
        if self.plan is None or self._snapshot is None:
            observed_s = self._demand.observed_s(now)
            enough = seen >= _FIRST_REQUESTS and observed_s >= _FIRST_S
            return "start" if enough or (seen and observed_s >= self._period_s) else None
        if sum(self.plan.counts.values()) != replicas:
            return "replicas"
        if tuple(self.plan.counts) != lengths:
            return "lengths"
        if not seen:
            return None
        if now - self._planned_at >= min(self._period_s, self._planned_from_s):
            return "period"
        shift = self._demand.shifted(now, self._snapshot)
        if shift is None:
            return None
        self._demand.forget(shift.since)
        return "shift"

    def problem(self, now: float, replicas: int, service_s: Mapping[int, float]) -> Problem:
        """What to solve now; `service_s` is the seconds that a request takes on a runtime of each max_length.

        Where nothing arrived lately, the demand of the last plan stands. Demand that is too much is reduced, all
        lengths alike: the allocation's own way out, the longest runtime's queue, would give the others up.
        """
        lengths = sorted(service_s)
        rates = self._demand.rates(now, lengths, self._quantile)
        if self.plan and not any(rates):
            rates = _binned(self.plan.demand, lengths)
        work_s = sum(rate * service_s[length] for length, rate in zip(lengths, rates, strict=True))
        share = min(1.0, _MOST_LOAD * replicas / work_s) if work_s else 1.0
        classes = tuple(runtime_class(length, service_s[length], self._slo_s) for length in lengths)
        demand = tuple(share * rate * self._slo_s for rate in rates)
        excess = (1 - share) * sum(rates) * self._slo_s
        snapshot = self._demand.snapshot(now, lengths, _UNSETTLED_S)
        return Problem(classes, demand, replicas, excess, snapshot, self.residency)

    def adopt(self, now: float, problem: Problem, solution: Allocation | Placement, reason: Reason) -> Plan:
        """Take over what `solve` found for `problem`."""
        lengths = [runtime.max_length for runtime in problem.classes]
        self._planned_at = now
        self._planned_from_s = self._demand.observed_s(now)
        self._snapshot = problem.snapshot
        self.plan = Plan(
            version=self.plan.version + 1 if self.plan else 1,
            counts=dict.fromkeys(lengths, 0),
            configurations=_configurations(lengths, solution),
            reason=reason,
            demand={length: rate / self._slo_s for length, rate in zip(lengths, problem.demand, strict=True)},
            excess=problem.excess / self._slo_s,
            solution=solution,
        )
        for configuration, count in self.plan.configurations.items():
            self.plan.counts[configuration.home] += count
        return self.plan


def _configurations(lengths: Sequence[int], solution: Allocation | Placement) -> dict[Configuration, int]:
    if isinstance(solution, Placement):
        return solution.replicas
    counts = zip(lengths, solution.counts, strict=True)
    return {Configuration(length, (length,)): count for length, count in counts if count}


def _binned(demand: Mapping[int, float], lengths: Sequence[int]) -> tuple[float, ...]:
    """Demand by other lengths, each part now at the shortest of `lengths` that fits, or at the longest."""
    rates = dict.fromkeys(lengths, 0.0)
    for former, rate in demand.items():
        rates[next((length for length in lengths if length >= former), lengths[-1])] += rate
    return tuple(rates.values())
