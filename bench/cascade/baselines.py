"""Each baseline at its best, chosen where the cascade is, but without its margin, which the papers' systems have not,
unless it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pliant.deployments.cascade.table import CascadeTable, Profiled
from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.cascade.choice import choose


@dataclass(frozen=True)
class Ensemble:
    """Small models that answer in parallel and vote (Cocktail): latency is the slowest's, cost is everybody's."""

    members: tuple[str, ...]
    rule: str
    """"majority", or "softmax" for the mean of what they say, weighted by accuracy."""
    weights: tuple[float, ...]
    met: bool
    """Whether it met the target where it was chosen."""

    def answers(self, probabilities: Mapping[str, Floats]) -> Integers:
        """The label of each text, [n], from what each model says, calibrated [n, labels]."""
        votes: list[Floats] = []
        for name, weight in zip(self.members, self.weights, strict=True):
            said = probabilities[name]
            votes.append(weight * (np.eye(said.shape[1])[said.argmax(axis=1)] if self.rule == "majority" else said))
        likeliest: Integers = np.sum(votes, axis=0).argmax(axis=1)
        return likeliest


def best_single(table: CascadeTable, loss: float, margin: float = 0.0) -> str:
    """The fastest model that meets the target alone (INFaaS), by so many standard errors."""
    singles = [candidate for candidate in table.candidates if len(candidate.levels) == 1]
    return choose(singles, accuracy_loss=loss, margin=margin).levels[0]


def best_ensemble(profiled: Profiled, loss: float) -> Ensemble:
    """The fastest vote of models without the best that meets the target; if none does, the most accurate one."""
    table = profiled.table
    names = [level.name for level in table.levels]
    said = dict(zip(names, profiled.probabilities, strict=True))
    latency_s = dict(zip(names, profiled.latency_s, strict=True))
    accuracy = {level.name: level.accuracy for level in table.levels}
    target = accuracy[names[table.best]] - loss
    small = [name for name in names if name != names[table.best]]
    found = []
    for members in (some for size in range(min(2, len(small)), len(small) + 1) for some in combinations(small, size)):
        weights = tuple(accuracy[name] for name in members)
        seconds = float(np.max([latency_s[name] for name in members], axis=0).mean())
        for rule in ("majority", "softmax"):
            right = Ensemble(members, rule, weights, False).answers(said) == profiled.truth
            met = bool(right.mean() >= target)
            found.append(((not met, seconds if met else -right.mean()), Ensemble(members, rule, weights, met)))
    return min(found, key=lambda one: one[0])[1]
