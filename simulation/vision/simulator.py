"""A replica in simulated time: the service's batcher, policy and pace, on a device that follows its profile.

It does what `deployments.vision.engine` does, without a task for each query, so that millions pass in minutes; tests
compare the two. A decision takes no time, as the engine's profile leaves out what is measured apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pliant.policies.vision.pace import Pace
from pliant.policies.vision.slo_batching import Batching, SloBatcher
from pliant.policies.vision.token_adaptation import Policy, Step
from pliant.policies.vision.token_profile import TokenProfile
from pliant.simulation.vision.outcome import Outcome, Query

NOISE = 0.03
"""Standard deviation of the logarithm of what a batch takes, over what the profile says."""


class Simulation:
    """One replica that computes one batch at a time; `accuracy(task, gamma)` tells how often it is right.

    `evicts`: whether queries leave that cannot be answered in time any more. `load_s`: for how long nothing is computed
    before a batch with another gamma than the last, by gamma; how models are switched. `batching`: as the service's
    unless given.
    """

    def __init__(
        self,
        profile: TokenProfile,
        policy: Policy[Query],
        accuracy: Callable[[str, int], float | None],
        batching: Batching | None = None,
        evicts: bool = True,
        load_s: Sequence[float] = (),
        noise: float = NOISE,
        seed: int = 0,
    ) -> None:
        self._profile = profile
        self._profiled_s = profile.latency_s.copy()
        self._policy = policy
        self._accuracy = accuracy
        self._evicts = evicts
        self._load_s = load_s
        self._batching = batching or Batching(most_rows=profile.most_rows)
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._pace = Pace(profile, now=0.0)
        self._loaded: int | None = None
        self._soonest_s = self._pace.soonest_s
        self._expiry = math.inf
        """No query that waits can be too late before."""

    def run(self, queries: Sequence[Query]) -> Outcome:
        """All of them; they arrive in order."""
        outcome = Outcome(queries)
        batcher: SloBatcher[Query] = SloBatcher(max(1, len(queries)), self._batching)
        to_come = iter(queries)
        following = next(to_come, None)
        now = 0.0
        while True:
            while following is not None and following.arrival <= now:
                self._admit(batcher, following)
                following = next(to_come, None)
            self._drop_late(batcher, now)
            step = self._step(batcher, now)
            if step is not None:
                now = self._compute(batcher, step, now, outcome)
            elif following is not None:
                now = following.arrival
            else:
                return outcome

    def _admit(self, batcher: SloBatcher[Query], query: Query) -> None:
        if query.arrival > self._expiry:
            self._drop_late(batcher, query.arrival)
        self._policy.arrived(query)
        batcher.add(query)
        self._expiry = min(self._expiry, query.deadline - self._soonest_s)

    def _drop_late(self, batcher: SloBatcher[Query], now: float) -> None:
        if self._evicts and now > self._expiry:
            batcher.drop_late(now + self._soonest_s)
            self._expiry = min((batch.deadline for batch in batcher.batches), default=math.inf) - self._soonest_s

    def _step(self, batcher: SloBatcher[Query], now: float) -> Step[Query] | None:
        if not len(batcher):
            return None
        plan = self._policy.plan(batcher.batches, now)
        return next((step for step in plan if step.gamma is not None and step.queries), None)

    def _compute(self, batcher: SloBatcher[Query], step: Step[Query], now: float, outcome: Outcome) -> float:
        """Until when it takes."""
        assert step.gamma is not None
        queries = tuple(step.queries)
        batcher.take(step.batch, queries)
        if self._load_s and step.gamma != self._loaded:
            now += self._load_s[step.gamma] if self._loaded is not None else 0.0
            self._loaded = step.gamma
        profiled_s = float(self._profiled_s[self._profile.gammas.index(step.gamma), len(queries) - 1])
        seconds = profiled_s * math.exp(self._noise * self._rng.standard_normal())
        self._pace.computed(step.gamma, len(queries), seconds, now + seconds)
        self._soonest_s = self._pace.soonest_s
        accuracies = [self._accuracy(query.task, step.gamma) or 0.0 for query in queries]
        outcome.ran(queries, step.gamma, accuracies, now + seconds)
        return now + seconds
