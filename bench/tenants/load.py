"""Two tenants: one that asks for less than its share, and one that asks for ten times its own, at its worst."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from pliant.deployments.serving.tenants import Tenant

Mode = Literal["alone", "shared", "as_one"]
"""The modest tenant alone; both; or both as one tenant, as it was before there were tenants."""
MODES: tuple[Mode, ...] = ("alone", "shared", "as_one")

MODEST_LOAD = 0.3
"""Of the capacity, of which half is its share."""
GREEDY_LOAD = 5.0
"""Ten times its share."""
FOR_EVER_S = 3600.0
"""As late as the greedy one takes answers."""


class Asked(NamedTuple):
    """A request."""

    at_s: float
    modest: bool
    tenant: Tenant


class Work(NamedTuple):
    """What requests take of a system."""

    modest_s: float
    """Seconds of work of a request of the modest one."""
    greedy_s: float
    """And of the other."""
    capacity: float
    """Seconds of work that are done in a second."""


@dataclass
class Found:
    """What became of the requests of the modest one, and what else was done."""

    asked: int = 0
    in_time: int = 0
    greedy: int = 0
    """Answers that the other got."""
    latencies: list[float] = field(default_factory=list)
    """Of the modest one's answers, in seconds."""

    @property
    def goodput(self) -> float:
        """Its requests that were answered in time, of all."""
        return self.in_time / self.asked

    def answered(self, modest: bool, seconds: float, slo_s: float) -> None:
        if modest:
            self.latencies.append(seconds)
            self.in_time += seconds <= slo_s
        else:
            self.greedy += 1

    def per_s(self, seconds: float) -> float:
        """Answers in time a second."""
        return self.in_time / seconds

    def p98_ms(self) -> float:
        """Of the modest one's answers."""
        return float(np.quantile(self.latencies, 0.98) * 1e3) if self.latencies else float("nan")


def steady(load: float, work: Work, seconds: float, seed: int) -> list[Asked]:
    """Poisson arrivals of modest requests for `seconds`, of which there are `load` times what can be done."""
    rng = np.random.default_rng(seed)
    return [Asked(at, True, Tenant("all")) for at in _poisson(rng, load * work.capacity / work.modest_s, seconds)]


def requests(mode: Mode, work: Work, seconds: float, seed: int) -> list[Asked]:
    """Poisson arrivals for `seconds`."""
    rng = np.random.default_rng(seed)
    found = [
        Asked(at, True, Tenant("modest" if mode != "as_one" else "all"))
        for at in _poisson(rng, MODEST_LOAD * work.capacity / work.modest_s, seconds)
    ]
    if mode != "alone":
        greedy = Tenant("greedy" if mode == "shared" else "all")
        found += [
            Asked(at, False, greedy) for at in _poisson(rng, GREEDY_LOAD * work.capacity / work.greedy_s, seconds)
        ]
    return sorted(found)


def _poisson(rng: np.random.Generator, rate: float, seconds: float) -> list[float]:
    count = int(rng.poisson(rate * seconds))
    return [float(at) for at in np.sort(rng.uniform(0, seconds, count))]
