"""One run of the live engine: queries come at their times, and every answer is compared with the image's label."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pliant.bench.vision.live_service import Service
from pliant.bench.vision.systems import FixedPolicy
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.vision.engine import Engine
from pliant.deployments.vision.messages import Answer, Query
from pliant.deployments.vision.queue import Waiting
from pliant.deployments.vision.tasks import key
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import Algorithm2Policy, ExactPolicy, Policy
from pliant.policies.vision.token_profile import TokenProfile
from pliant.simulation.vision import outcome
from pliant.simulation.vision.outcome import Outcome

_QUEUE = 4096
"""More than ever wait within their deadlines: what is evicted is up to the policy."""


class System(NamedTuple):
    """How batches get their gamma."""

    name: str
    policy: Callable[[TokenProfile], Policy[Waiting]]
    gammas: tuple[int, ...] | None = None
    """All that are of use, or only these."""


OURS = System("ours", lambda profile: ExactPolicy(profile, TimePrice(profile)))
ALGORITHM_2 = System("Algorithm 2", Algorithm2Policy)


def fixed(gamma: int) -> System:
    """PetS at 0, ToMe below and VPT above."""
    name = "PetS" if gamma == 0 else f"{'ToMe' if gamma < 0 else 'VPT'} {gamma:+d}"
    return System(name, lambda profile: FixedPolicy(profile, gamma), (gamma,))


class Asked(NamedTuple):
    """A query with its image."""

    query: outcome.Query
    image: bytes
    label: int | None
    """None: the answer is right as often as the task's accuracy says."""


@dataclass
class Served:
    """What became of the queries of a run."""

    outcome: Outcome
    decision_ms: float
    """P99."""
    gammas: list[tuple[float, int]] = field(default_factory=list)
    """When answers came, and under which gamma."""


def with_images(queries: Sequence[outcome.Query], service: Service, seed: int) -> list[Asked]:
    """Each with an image of its task, drawn at random."""
    rng = np.random.default_rng(seed)
    asked = []
    for query in queries:
        examples = service.held_out[query.task]
        index = int(rng.integers(len(examples.labels)))
        label = int(examples.labels[index]) if service.labelled else None
        asked.append(Asked(query, examples.images[index].tobytes(), label))
    return asked


async def serve(service: Service, system: System, asked: Sequence[Asked]) -> Served:
    """Ask a new engine, as clients do that wait for nobody; their deadlines begin with their arrival in the trace."""
    profile = service.profile(system.gammas)
    engine = Engine(service.device, service.tasks, profile, system.policy(profile), _QUEUE)
    loop = asyncio.get_running_loop()
    replies: list[tuple[float, Answer | Refusal]] = [(0.0, Refusal("failed", ""))] * len(asked)
    begun = loop.time()

    async def ask(place: int, each: Asked) -> None:
        query = each.query
        left_s = begun + query.deadline - loop.time()
        reply = await engine.classify(Query(each.image, service.refs[query.task], left_s, query.utility))
        replies[place] = loop.time() - begun, reply

    async with asyncio.TaskGroup() as clients:
        for place, each in enumerate(asked):
            if (until_s := begun + each.query.arrival - loop.time()) > 0:
                await asyncio.sleep(until_s)
            clients.create_task(ask(place, each))
    decision_ms = engine.report()["decision_p99_ms"]
    failure = engine.failure
    await engine.close()
    if failure is not None:
        raise failure
    served = Served(Outcome([each.query for each in asked]), decision_ms)
    for each, (at_s, reply) in zip(asked, replies, strict=True):
        if isinstance(reply, Answer):
            served.outcome.ran([each.query], reply.gamma, [_accuracy(service, each, reply)], at_s)
            served.gammas.append((at_s, reply.gamma))
        elif reply.cause == "failed":
            raise RuntimeError(f"{system.name}: {reply.reason}")
    return served


def _accuracy(service: Service, asked: Asked, answer: Answer) -> float:
    """1 or 0 where the label is known."""
    if asked.label is None:
        return service.tasks.accuracy(key(service.refs[asked.query.task]), answer.gamma) or 0.0
    return float(np.frombuffer(answer.logits, "<f4").argmax() == asked.label)
