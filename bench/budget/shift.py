"""A load that moves from texts to images to chat, and what `pliant simulate` says will come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pliant.bench.budget.devices import ACCURACY, MAX_LENGTH, PROMPT_S, ROW_S, SLOTS, STEP_S, TEXT_S, image_s
from pliant.deployments.kinds import parse
from pliant.deployments.vision.assembly import MOST_ROWS
from pliant.policies.cluster.budget import Nodes
from pliant.policies.cluster.control import Decision, Offer, Policy
from pliant.policies.cluster.room import counted
from pliant.policies.vision.token_profile import TokenProfile
from pliant.policies.vision.value_curve import row_seconds
from pliant.simulation import speeds
from pliant.simulation.cluster.simulator import Outcome, Served, Simulation
from pliant.simulation.cluster.trace import Load

TEXTS, IMAGES, CHAT = SERVICES = ("texts", "images", "chat")
"""In the order in which they are asked much."""
PLACES = 6
SLO_S: Mapping[str, float] = {TEXTS: 1.0, IMAGES: 1.0, CHAT: 2.0}
"""Of chat: to the first token."""
WEIGHTS: Mapping[str, float] = {TEXTS: 1.0, IMAGES: 1.0, CHAT: 2.0}
PROMPT, ANSWER = 16, 16
"""Tokens."""
HOT, COLD = 3.4, 0.45
"""Of what a place can do, that is asked of a service in its phase and in the others."""
_CPUS = 2.0
_KINDS: Mapping[str, dict[str, Any]] = {
    TEXTS: {"kind": "encoder"},
    IMAGES: {"kind": "vision", "gammas": sorted(ACCURACY)},
    CHAT: {"kind": "llm", "slots": SLOTS, "max_length": MAX_LENGTH},
}

Split = Mapping[str, int]
"""Places by service."""


class Asked(NamedTuple):
    """A request."""

    at_s: float
    service: str


def args(models: Mapping[str, str], replicas: Mapping[str, Any], state: str, **changes: Any) -> dict[str, Any]:
    """Of the application: `models` are folders by service, `replicas` a number or {min, max}."""
    each: dict[str, Any] = {"cpus": 0.05, "gpus": 1}
    services = {
        name: {
            **each,
            **_KINDS[name],
            "model": models[name],
            "replicas": replicas[name],
            "weight": WEIGHTS[name],
            "slo_ms": 1e3 * SLO_S[name],
        }
        for name in SERVICES
    }
    return {"gateway": {"cpus": 0.05}, "state": state, "services": services, **changes}


def arrivals(phase_s: float, rates: Mapping[str, float], seed: int) -> list[Asked]:
    """Poisson arrivals of three phases, in order; `rates` are what a place can do."""
    found = []
    for phase, hot in enumerate(SERVICES):
        for at, name in enumerate(SERVICES):
            rng = np.random.default_rng([seed, phase, at])
            mean = phase_s * rates[name] * (HOT if name == hot else COLD)
            times = phase * phase_s + phase_s * rng.random(rng.poisson(mean))
            found += [Asked(float(time), name) for time in times]
    return sorted(found)


def per_place() -> dict[str, float]:
    """Requests per second that a place can do of each service, images at their best."""
    return {name: each.each for name, each in _services({}, {}).items()}


class Fixed:
    """A budget's policy: as many replicas as ever."""

    def __init__(self, replicas: Split) -> None:
        self._replicas = replicas

    def decide(self, now: float, offers: Sequence[Offer], nodes: Sequence[Nodes], reserve: int = 0) -> Decision:
        return Decision(self._replicas, (0,) * len(offers), (), {})


def simulated(
    asked: Sequence[Asked], seconds: float, policy: Policy, begin: Split, starts: Mapping[str, float]
) -> Outcome:
    """What `pliant simulate` says of these requests, of replicas that take `starts` seconds to start."""
    counts = {name: np.zeros(int(seconds)) for name in SERVICES}
    for each in asked:
        counts[each.service][int(each.at_s)] += 1
    services = _services(counts, starts)
    return Simulation(list(services.values()), [], counted(_nodes(), _nodes()), recorded=True).run(policy, begin)


def splits() -> Iterator[dict[str, int]]:
    """All that use each place, and leave one to each service."""
    for texts in range(1, PLACES - 1):
        for images in range(1, PLACES - texts):
            yield {TEXTS: texts, IMAGES: images, CHAT: PLACES - texts - images}


def best_splits(asked: Sequence[Asked], seconds: float, number: int) -> list[dict[str, int]]:
    """Those fixed ones of which the most is foreseen, with all of the load known."""

    def foreseen(split: Split) -> float:
        return simulated(asked, seconds, Fixed(split), split, {}).attainment

    return sorted(splits(), key=foreseen, reverse=True)[:number]


def shares(outcome: Outcome) -> dict[str, float]:
    """Attainment by service."""
    return {name: outcome.earned[name] / outcome.possible[name] for name in SERVICES}


def weighted(attained: Mapping[str, float]) -> float:
    """The attainment of all services."""
    return sum(WEIGHTS[name] * attained[name] for name in SERVICES) / sum(WEIGHTS.values())


def _services(counts: Mapping[str, np.ndarray], starts: Mapping[str, float]) -> dict[str, Served]:
    sizes = {name: {"min": 1, "max": 4} for name in SERVICES}
    config = parse(args(dict.fromkeys(SERVICES, "m"), sizes, "/", budget={}))
    loads = {
        name: Load(counts.get(name, np.ones(1)), PROMPT * (name == CHAT), ANSWER * (name == CHAT)) for name in SERVICES
    }
    profile = TokenProfile(ACCURACY, image_s, lambda task, gamma: ACCURACY[gamma], MOST_ROWS)
    start_s = {name: starts.get(name, 0.0) for name in SERVICES}
    found: dict[str, speeds.ReplicaSpeeds] = {
        TEXTS: speeds.TextSpeeds(start_s=start_s[TEXTS], text_ms=1e3 * TEXT_S),
        IMAGES: speeds.ImageSpeeds(
            start_s=start_s[IMAGES],
            image_ms=tuple((1e3 * row_seconds(profile, SLO_S[IMAGES])).tolist()),
            slo_ms=1e3 * SLO_S[IMAGES],
            accuracy=tuple(ACCURACY[gamma] for gamma in profile.gammas),
        ),
        CHAT: speeds.AnswerSpeeds(
            start_s=start_s[CHAT], prompt_tokens_per_s=1 / PROMPT_S, step_ms=1e3 * STEP_S, row_ms=1e3 * ROW_S
        ),
    }
    return {each.name: each for each in speeds.services(config, loads, found, _nodes())}


def _nodes() -> list[Nodes]:
    return [Nodes(1, PLACES, _CPUS)]
