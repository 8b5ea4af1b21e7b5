"""Whether an image should run again at a higher gamma where the first answer is not sure: what that would earn.

A *pair* runs a batch at one gamma, and then those of its images again at a higher one whose answers are the least sure.
To the plan it is one more gamma, with the seconds of both and the accuracy that comes of them: the service's own plan
takes pairs wherever they earn more than any gamma, for those batches for which there is time. Which confidence is low,
and how accurate a pair is, is learned on one half of a task's images; what it earns is judged on the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.bench.findings import Findings
from pliant.bench.report import median
from pliant.bench.vision import workload
from pliant.bench.vision.profiles import MOST_ROWS, Profile
from pliant.bench.vision.runs import Runs
from pliant.bench.vision.systems import System
from pliant.bench.vision.workload import Trace
from pliant.deployments.vision.accuracy import Run
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import ExactPolicy
from pliant.policies.vision.token_profile import Floats, dominated
from pliant.simulation.vision.outcome import Query
from pliant.simulation.vision.simulator import Simulation

Rows = NDArray[np.intp]
Split = Mapping[str, Rows]
"""Some images of each task."""
_SHARES = (0.1, 0.2, 0.3, 0.4)
"""Of a batch, that run again."""
_SPLITS = 2
_SEED = 0


class Answers(NamedTuple):
    """Of a task's images under one gamma."""

    sure: Floats
    """The probability of the likeliest label."""
    right: NDArray[np.bool_]

    @classmethod
    def of(cls, logits: NDArray[np.float32], labels: NDArray[np.int64]) -> Answers:
        """From [image, label], and the true labels."""
        odds = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
        return cls(1 / odds.sum(axis=1), logits.argmax(axis=1) == labels)


def answered(
    run: Run, images: NDArray[np.uint8], labels: NDArray[np.int64], gammas: Sequence[int], most_rows: int
) -> dict[int, Answers]:
    """By gamma, to a task's images; `run(images, gamma)` gives logits for up to `most_rows`."""
    batches = np.array_split(images, range(most_rows, len(images), most_rows))
    return {gamma: Answers.of(np.concatenate([run(batch, gamma) for batch in batches]), labels) for gamma in gammas}


Known = Mapping[str, Mapping[int, Answers]]
"""By task and gamma, of the same images each."""


class Pair(NamedTuple):
    """The least sure `share` of a batch runs again."""

    first: int
    second: int
    share: float

    def seconds(self, profile: Profile) -> tuple[float, ...]:
        """By rows less 1."""
        return tuple(
            profile.latency(self.first, rows) + profile.latency(self.second, math.ceil(self.share * rows))
            for rows in range(1, MOST_ROWS + 1)
        )

    def accuracy(self, of_gamma: Mapping[int, Answers], learned: Rows, judged: Rows) -> float:
        """Of the images `judged`, where those that are less sure than such a share of those `learned` run again."""
        first, second = of_gamma[self.first], of_gamma[self.second]
        again = first.sure[judged] < np.quantile(first.sure[learned], self.share)
        return float(np.where(again, second.right[judged], first.right[judged]).mean())


@dataclass(frozen=True)
class Judged(System):
    """The service's plan by what its profile says of all gammas or some, and what comes of it by other accuracies."""

    accuracies: Mapping[str, Mapping[int, float]]
    gammas: tuple[int, ...] | None = None

    def simulation(self, profile: Profile) -> Simulation:
        tokens = profile.tokens(self.gammas)
        policy: ExactPolicy[Query] = ExactPolicy(tokens, TimePrice(tokens))
        return Simulation(tokens, policy, lambda task, gamma: self.accuracies[task][gamma])


def compare(runs: Runs, profile: Profile, known: Known, seconds: int, suffix: str) -> Findings:
    """What the plan earns with pairs, over what it earns with gammas alone. All tasks of `known` have the gammas of
    `profile`."""
    synthetic = workload.synthetic(seconds, _SEED)
    traces = {"synthetic": synthetic, "calibrated_synthetic": synthetic.peaking_at(workload.CALIBRATED_PEAK)}
    every = {task: np.arange(len(of_gamma[0].right)) for task, of_gamma in known.items()}
    rng = np.random.default_rng(_SEED)
    halves = [_halves(every, rng) for _ in range(_SPLITS)]
    found = Findings()
    for name, trace in traces.items():
        held_out = []
        for one, other in halves:
            parts = [_earned(runs, profile, known, *both, trace) for both in ((one, other), (other, one))]
            alone, paired = np.sum(parts, axis=0).tolist()
            held_out.append(paired / alone)
        alone, paired = _earned(runs, profile, known, every, every, trace)
        most = _at_best(replace(profile, accuracies=accuracies(profile.gammas, known, every, every)), trace)
        beside = (
            f"{paired / alone:.4f} judged by the images that were learned from; {most / alone:.4f} if every image had "
            "its task's best gamma and that took no time"
        )
        found.figures.append(median(f"refine_vs_exact_{name}{suffix}", held_out, ">= 1.03", beside))
    return found


def _halves(every: Split, rng: np.random.Generator) -> tuple[Split, Split]:
    cut = {task: np.array_split(rng.permutation(rows), 2) for task, rows in every.items()}
    return {task: one for task, (one, _) in cut.items()}, {task: other for task, (_, other) in cut.items()}


def pairs(gammas: Sequence[int]) -> dict[int, Pair]:
    """All of them, by the number that stands for each beside the gammas."""
    every = (Pair(first, second, share) for first, second in combinations(gammas, 2) for share in _SHARES)
    return dict(enumerate(every, max(gammas) + 1))


def accuracies(gammas: Sequence[int], known: Known, learned: Split, judged: Split) -> dict[str, dict[int, float]]:
    """Of gammas and pairs, on the images `judged`, by task."""
    return {
        task: {gamma: float(of_gamma[gamma].right[judged[task]].mean()) for gamma in gammas}
        | {name: pair.accuracy(of_gamma, learned[task], judged[task]) for name, pair in pairs(gammas).items()}
        for task, of_gamma in known.items()
    }


def with_pairs(profile: Profile, known: Known, learned: Split) -> Profile:
    """Gammas, and the pairs that some task has a use for, as the images `learned` have it."""
    found = accuracies(profile.gammas, known, learned, learned)
    names = (*profile.gammas, *pairs(profile.gammas))
    seconds = (*profile.seconds, *(pair.seconds(profile) for pair in pairs(profile.gammas).values()))
    table = np.array([[of_name[name] for name in names] for of_name in found.values()])
    useless = dominated(names, np.array(seconds), table).keys() - set(profile.gammas)
    kept = {name: each for name, each in zip(names, seconds, strict=True) if name not in useless}
    return replace(profile, gammas=tuple(kept), seconds=tuple(kept.values()), accuracies=found)


def _earned(
    runs: Runs, profile: Profile, known: Known, learned: Split, judged: Split, trace: Trace
) -> tuple[float, float]:
    """Expected utility with gammas alone, and with pairs."""
    true = accuracies(profile.gammas, known, learned, judged)
    systems = Judged("gammas", true, profile.gammas), Judged("pairs", true)
    outcomes = runs.all(with_pairs(profile, known, learned), systems, trace)
    return outcomes["gammas"].expected, outcomes["pairs"].expected


def _at_best(profile: Profile, trace: Trace) -> float:
    """Expected utility if every query had its task's best gamma in time."""
    best = {task: max(of_name[gamma] for gamma in profile.gammas) for task, of_name in profile.accuracies.items()}
    return sum(query.utility * best[query.task] for query in trace.queries(profile.per_s(), profile.roles))
