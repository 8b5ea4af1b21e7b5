"""Which gamma each queued batch gets, or whether it runs at all, anew before every run (OTAS §III-D).

`ExactPolicy` is the default, `Algorithm2Policy` the paper's.
Batches are planned in the order of their deadlines, each with those of its queries that could be in time if it were
next (`plan_scope`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol

import numpy as np

from pliant.policies.vision.one_clock_plan import BETA, INITIAL_S, KAPPA, algorithm_2, algorithm_3
from pliant.policies.vision.pareto_plan import best_plan
from pliant.policies.vision.plan_scope import Queued, horizon, runnable
from pliant.policies.vision.rate_to_gamma import RateToGamma, RecentRate
from pliant.policies.vision.slo_batching import Batch, Q
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_profile import Floats, TokenProfile

_LEAST_UTILITY = 1e-6
"""What a query counts for at least, so that one of utility 0 is answered too when nothing speaks against it."""


class Step(NamedTuple, Generic[Q]):
    """What is to become of one batch, as things stand."""

    batch: Batch[Q]
    gamma: int | None
    """None: it does not run; its queries wait until they are late, or things change."""
    queries: Sequence[Q]
    """Those of the batch that run, or would."""


class Policy(Protocol[Q]):
    """Plans what waits. `now`, arrivals and deadlines are on one clock that does not run backwards."""

    def arrived(self, query: Q) -> None:
        """A query came; to be told of each, in their order."""
        ...

    def plan(self, batches: Sequence[Batch[Q]], now: float) -> list[Step[Q]]:
        """Steps in the order in which they would run. Run the first that has a gamma, and plan anew.

        A batch of which no query can be in time is left out.
        """
        ...


class ExactPolicy(Generic[Q]):
    """The plan of the greatest utility for those that wait, less the price of the time it takes from those to come.

    `pareto_plan` tells what is proven of it, `plan_scope` which batches of a long queue it is made for, `time_price`
    what a second costs; without a price it is free. If no batch is worth its time, those that take the least are
    planned, and only what they take beyond that is paid for: the device does not wait for better ones.
    """

    def __init__(self, profile: TokenProfile, price: TimePrice | None) -> None:
        self._profile = profile
        self._price = price

    def arrived(self, query: Q) -> None:
        if self._price:
            self._price.arrived(query)

    def plan(self, batches: Sequence[Batch[Q]], now: float) -> list[Step[Q]]:
        queued = runnable(self._profile, self._profile.latency_s, batches, now)
        if not queued:
            return []
        latency_s, gain, due = _estimates(self._profile, queued)
        price = self._price(now, sum(map(len, batches))) if self._price else 0.0
        left = _less(gain, price, latency_s)
        if not left[now + latency_s <= np.array(due)[:, None]].any():
            left = _less(gain, price, latency_s - latency_s.min(axis=1, keepdims=True))
        planned = horizon(now, latency_s, left, due)
        plan = best_plan(now, latency_s[planned], left[planned], [due[batch] for batch in planned])
        choices = dict(zip(planned, plan.choices, strict=True))
        return _steps(self._profile, queued, [choices.get(batch) for batch in range(len(queued))])


class Algorithm2Policy(Generic[Q]):
    """Algorithm 2; and Algorithm 3, with `kappa`, for up to `beta` batches, and in the first INITIAL_S seconds.

    The rate is that of about the last `window_s` seconds.
    """

    def __init__(self, profile: TokenProfile, window_s: float = 0.5, beta: int = BETA, kappa: float = KAPPA) -> None:
        self._profile = profile
        self._gamma = RateToGamma(profile)
        self._rate = RecentRate(window_s)
        self._beta = beta
        self._kappa = kappa
        self._start: float | None = None

    def arrived(self, query: Q) -> None:
        if self._start is None:
            self._start = query.arrival
        self._rate.add(query.arrival)

    def plan(self, batches: Sequence[Batch[Q]], now: float) -> list[Step[Q]]:
        queued = runnable(self._profile, self._profile.latency_s, batches, now)
        if not queued:
            return []
        latency_s, gain, due = _estimates(self._profile, queued)
        initial = self._start is None or now < self._start + INITIAL_S
        choices: Sequence[int | None]
        if len(queued) <= self._beta or initial:
            usual = self._profile.gammas.index(self._gamma(self._rate.value(now)))
            means = [sum(query.utility for query in entry.queries) / len(entry.queries) for entry in queued]
            choices = algorithm_3(now, latency_s, means, due, usual, self._kappa)
        else:
            choices = algorithm_2(now, latency_s, gain, due)
        return _steps(self._profile, queued, choices)


def _estimates(profile: TokenProfile, queued: Sequence[Queued[Q]]) -> tuple[Floats, Floats, list[float]]:
    """Seconds, infinite where a task lacks the gamma, and utility times accuracy, [batch, gamma] each; and the dues."""
    latency_s = profile.latency_s[:, [len(entry.queries) - 1 for entry in queued]].T
    gain = profile.utility(
        ((query.task, max(query.utility, _LEAST_UTILITY)) for query in entry.queries) for entry in queued
    )
    lacking = np.isnan(gain)
    return np.where(lacking, np.inf, latency_s), np.where(lacking, 0.0, gain), [entry.due for entry in queued]


def _less(gain: Floats, price: float, seconds: Floats) -> Floats:
    """The gain that is left when seconds have their price."""
    return np.maximum(gain - price * seconds, 0.0) if price else gain


def _steps(profile: TokenProfile, queued: Sequence[Queued[Q]], choices: Sequence[int | None]) -> list[Step[Q]]:
    return [
        Step(entry.batch, None if choice is None else profile.gammas[choice], entry.queries)
        for entry, choice in zip(queued, choices, strict=True)
    ]
