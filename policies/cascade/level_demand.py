"""What a cascade asks of its levels, and what each level's answers are worth to it.

A cascade has no replicas: its levels are services of their own. Which cut-offs it uses decides how many texts reach
each of them, so the budget is split together with that choice: one alternative for each candidate on the front of those
that keep the promise. A text that a later level does not answer in time has the earlier one's answer, so a level earns
what it makes answers more accurate by. Past a gate no level comes before the last, which earns the whole answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pliant.policies.cascade.candidates import Candidate


class LevelDemand(NamedTuple):
    """Of one level."""

    rate: float
    """Texts per second that reach it."""
    worth: float
    """Of one answer in time, in accuracy beyond the levels before."""


def level_demand(candidate: Candidate, rate: float, alone: Mapping[str, float]) -> dict[str, LevelDemand]:
    """By level, of a cascade that is asked `rate` texts per second; `alone` is the accuracy of each level by itself.

    The first level's answers are worth its accuracy; what the cascade adds to that is shared by the later levels'
    answers alike. Texts past the gate are taken to be answered as accurately as the others.
    """
    first = min(alone[candidate.levels[0]], candidate.accuracy)
    reached, gated = candidate.reached, candidate.gated_share
    asked = sum(reached[1:])
    added = reached[0] * (candidate.accuracy - first) / asked if asked else 0.0
    demand = {
        level: LevelDemand(rate * share, added if at else first)
        for at, (level, share) in enumerate(zip(candidate.levels, reached, strict=True))
    }
    if gated:
        share = reached[-1] + gated
        worth = (reached[-1] * added + gated * candidate.accuracy) / share
        demand[candidate.levels[-1]] = LevelDemand(rate * share, worth)
    return demand
