"""How Arlo steers a simulated fleet: the live system's planner and autoscaling, called each second (§3.3, §4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pliant.policies.cluster.autoscaling import TargetTracking
from pliant.policies.encoder import replacement
from pliant.policies.encoder.planning import Plan, Planner, solve
from pliant.simulation.encoder.fleet import Fleet
from pliant.simulation.encoder.simulator import Second

STARTUP_S = 10.0
"""From the decision to add a replica until it takes requests: a process starts and loads a model."""


class Planned:
    """Arlo's runtime scheduler: the planner decides, and replicas change over in small batches (§3.3, §4)."""

    def __init__(self, planner: Planner, lengths: Sequence[int]) -> None:
        self.plans: list[tuple[float, Plan]] = []
        """What was decided, and when."""
        self._planner = planner
        self._lengths = tuple(lengths)

    def tick(self, now: float, fleet: Fleet, second: Second) -> None:
        self._planner.observe(now, second.lengths)
        if fleet.replacing:
            return
        reason = self._planner.due(now, len(fleet.holds), self._lengths)
        if reason:
            service_s = {length: fleet.service_s(length) for length in self._lengths}
            problem = self._planner.problem(now, len(fleet.holds), service_s)
            plan = self._planner.adopt(now, problem, solve(problem), reason)
            self.plans.append((now, plan))
            reallocate(now, fleet, plan.counts)


class Scaled:
    """Arlo's resource scaling: replicas are added for the longest length; the least busy are removed (§3.3, §4)."""

    def __init__(self, tracking: TargetTracking, longest: int) -> None:
        self._tracking = tracking
        self._longest = longest

    def tick(self, now: float, fleet: Fleet, second: Second) -> None:
        self._tracking.observe(now, second.answered, second.near_slo, second.above_half, second.shed)
        resize(now, fleet, self._tracking.desired(now, len(fleet.holds)), self._longest)


def reallocate(now: float, fleet: Fleet, counts: Mapping[int, int]) -> None:
    """Change replicas over so that `counts` hold each max_length, in small batches."""
    busy = {replica: max(0, round((fleet.free_at[replica] - now) * 1e6)) for replica in fleet.holds}
    fleet.replace(now, replacement.batches(fleet.holds, counts, busy))


def resize(now: float, fleet: Fleet, replicas: int, longest: int) -> None:
    """Start or stop replicas; those that are changing over, and the last of the longest length, stay."""
    running = len(fleet.holds) + len(fleet.starting)
    for _ in range(replicas - running):
        fleet.start(now, longest, STARTUP_S)
    idle_first = sorted(fleet.holds.keys() - fleet.switching, key=lambda replica: fleet.free_at[replica])
    of_longest = sum(1 for replica in idle_first if fleet.holds[replica] == longest)
    for replica in idle_first:
        if running <= replicas:
            break
        if fleet.holds[replica] == longest:
            if of_longest == 1:
                continue
            of_longest -= 1
        fleet.stop(now, replica)
        running -= 1
