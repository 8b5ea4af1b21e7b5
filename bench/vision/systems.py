"""The systems that are compared (OTAS §V): ours, Algorithm 2 as published, PetS, ToMe, VPT, INFaaS, and SlackFit.

All but Algorithm 2 get our batches, with which they earn more than with those of Algorithm 1 as it is written. SlackFit
(SuperServe) is tried with them and with its own single queue.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np

from pliant.bench.vision.profiles import LOAD_S, Profile
from pliant.bench.vision.slack_fit import SlackFitPolicy
from pliant.policies.vision.plan_scope import runnable
from pliant.policies.vision.rate_to_gamma import RecentRate
from pliant.policies.vision.slo_batching import Batch, Batching, Q
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import Algorithm2Policy, ExactPolicy, Policy, Step
from pliant.policies.vision.token_profile import TokenProfile, dominated
from pliant.simulation.vision.outcome import Query
from pliant.simulation.vision.simulator import Simulation


class FixedPolicy(Generic[Q]):
    """The same gamma always (PetS: 0, ToMe: below 0, VPT: above 0), for every batch that would be in time."""

    def __init__(self, profile: TokenProfile, gamma: int) -> None:
        self._profile = profile
        self._gamma = gamma
        self._choice = profile.gammas.index(gamma)

    def arrived(self, query: Q) -> None:
        """The rate does not matter."""

    def plan(self, batches: Sequence[Batch[Q]], now: float) -> list[Step[Q]]:
        latency_s = np.full_like(self._profile.latency_s, np.inf)
        latency_s[self._choice] = self._profile.latency_s[self._choice]
        queued = runnable(self._profile, latency_s, batches, now)
        steps = []
        for entry in queued:
            seconds = float(latency_s[self._choice, len(entry.queries) - 1])
            in_time = now + seconds <= entry.due
            steps.append(Step(entry.batch, self._gamma if in_time else None, entry.queries))
            now += seconds if in_time else 0.0
        return steps


@dataclass(frozen=True)
class System:
    """What serves; picklable, and made anew for each run."""

    name: str

    def simulation(self, profile: Profile) -> Simulation:
        raise NotImplementedError


@dataclass(frozen=True)
class Adaptive(System):
    """The exact plan, with a price of time, of all gammas or only some."""

    gammas: tuple[int, ...] | None = None

    def simulation(self, profile: Profile) -> Simulation:
        tokens = profile.tokens(self.gammas)
        policy: ExactPolicy[Query] = ExactPolicy(tokens, TimePrice(tokens))
        return Simulation(tokens, policy, profile.accuracy)


@dataclass(frozen=True)
class Published(System):
    """Algorithms 2 and 3; with batches of Algorithm 1 as written, unless `factor` keeps utilities further apart."""

    factor: float = math.inf

    def simulation(self, profile: Profile) -> Simulation:
        tokens = profile.tokens()
        policy: Algorithm2Policy[Query] = Algorithm2Policy(tokens)
        return Simulation(tokens, policy, profile.accuracy, Batching(factor=self.factor))


@dataclass(frozen=True)
class Fixed(System):
    """One gamma for all: the earliest deadline first, without what would be late."""

    gamma: int = 0

    def simulation(self, profile: Profile) -> Simulation:
        tokens = profile.tokens((self.gamma,))
        policy: FixedPolicy[Query] = FixedPolicy(tokens, self.gamma)
        return Simulation(tokens, policy, profile.accuracy)


class NeverEvicting(System):
    """Gamma 0, in the order of arrival, and each query is computed, late or not."""

    def simulation(self, profile: Profile) -> Simulation:
        return Simulation(profile.tokens((0,)), _InOrder(), profile.accuracy, evicts=False)


class Choice(NamedTuple):
    """When INFaaS changes its model."""

    load: float
    """Share of a model's throughput up to which it is used; the most accurate one that carries the rate is."""
    window_s: float
    """About how long the rate is averaged."""
    hold_s: float
    """A more accurate model comes only after that long with another."""


@dataclass(frozen=True)
class Models(System):
    """INFaaS: one of three models at a time. When it changes, the device waits until the next one is loaded."""

    choice: Choice
    load_s: Sequence[float] = LOAD_S

    def simulation(self, profile: Profile) -> Simulation:
        models = profile.models()
        tokens = models.tokens()
        return Simulation(tokens, _Switching(tokens, self.choice), models.accuracy, load_s=self.load_s)


@dataclass(frozen=True)
class SlackFit(System):
    """SuperServe's policy, with gammas in the place of its subnets; see bench.vision.slack_fit."""

    buckets: int
    our_batches: bool

    def simulation(self, profile: Profile) -> Simulation:
        tokens = profile.tokens(_useful_to_all(profile))
        policy: SlackFitPolicy[Query] = SlackFitPolicy(tokens, self.buckets)
        return Simulation(tokens, policy, profile.accuracy, batching=None if self.our_batches else _ONE_QUEUE)


OURS = Adaptive("ours")
OURS_AT_0 = Adaptive("our plan at gamma 0", gammas=(0,))
ALGORITHM_2 = Published("Algorithm 2")
ALGORITHM_2_BATCHES = Published("Algorithm 2 on our batches", factor=2.0)
PETS = Fixed("PetS")
PETS_NEVER_EVICTING = NeverEvicting("PetS, never evicting")


def fixed(profile: Profile) -> list[Fixed]:
    """ToMe and VPT: all gammas that are not 0."""
    return [Fixed(f"{'ToMe' if gamma < 0 else 'VPT'} {gamma:+d}", gamma) for gamma in profile.gammas if gamma]


def infaas(choices: Sequence[Choice]) -> list[Models]:
    """One for each choice."""
    return [
        Models(f"INFaaS ({choice.load:g}, {choice.window_s:g} s, {choice.hold_s:g} s)", choice) for choice in choices
    ]


def slackfits() -> list[SlackFit]:
    """With few and many buckets, in a queue of its own and on our batches."""
    return [
        SlackFit(f"SlackFit ({buckets} buckets, {'our batches' if ours else 'one queue'})", buckets, ours)
        for ours in (False, True)
        for buckets in (8, 32, 128)
    ]


_ONE_QUEUE = Batching(delta_s=math.inf, most_rows=sys.maxsize, eta_s=math.inf, mu=math.inf, factor=math.inf)
"""All that waits is close to each other."""


def _useful_to_all(profile: Profile) -> tuple[int, ...]:
    """The gammas that each task has, and no other one is both as fast and as accurate as."""
    shared = [gamma for gamma in profile.gammas if all(gamma in known for known in profile.accuracies.values())]
    latency_s = np.array([profile.seconds[profile.gammas.index(gamma)] for gamma in shared])
    accuracy = np.array([[known[gamma] for gamma in shared] for known in profile.accuracies.values()])
    useless = dominated(shared, latency_s, accuracy)
    return tuple(gamma for gamma in shared if gamma not in useless)


class _InOrder:
    """Every batch runs whole, in the order in which they opened."""

    def arrived(self, query: Query) -> None:
        """The rate does not matter."""

    def plan(self, batches: Sequence[Batch[Query]], now: float) -> list[Step[Query]]:
        return [Step(batch, 0, batch.queries) for batch in batches]


class _Switching:
    """Follows the rate with one of the models, all of whose batches are planned as at a fixed gamma."""

    def __init__(self, profile: TokenProfile, choice: Choice) -> None:
        self._choice = choice
        self._rate = RecentRate(choice.window_s)
        self._most = (choice.load / profile.row_s()).tolist()
        """Queries per second that each model carries."""
        self._plans: list[Policy[Query]] = [FixedPolicy(profile, model) for model in profile.gammas]
        self._model = 0
        self._since = -choice.hold_s

    def arrived(self, query: Query) -> None:
        self._rate.add(query.arrival)

    def plan(self, batches: Sequence[Batch[Query]], now: float) -> list[Step[Query]]:
        rate = self._rate.value(now)
        carrying = [model for model, most in enumerate(self._most) if most >= rate]
        wanted = carrying[-1] if carrying else 0
        if wanted < self._model or (wanted > self._model and now >= self._since + self._choice.hold_s):
            self._model, self._since = wanted, now
        return self._plans[self._model].plan(batches, now)
