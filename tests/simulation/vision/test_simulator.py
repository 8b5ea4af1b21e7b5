"""The simulated replica against the real engine, and against what its systems promise."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support import virtual_loop

from pliant.bench.vision import profiles, workload
from pliant.bench.vision.profiles import Profile
from pliant.bench.vision.slack_fit import SlackFitPolicy
from pliant.bench.vision.systems import (
    ALGORITHM_2,
    OURS,
    PETS,
    PETS_NEVER_EVICTING,
    Choice,
    System,
    fixed,
    infaas,
    slackfits,
)
from pliant.bench.vision.workload import Trace
from pliant.deployments.vision import messages
from pliant.deployments.vision.engine import Engine
from pliant.deployments.vision.messages import Answer
from pliant.deployments.vision.queue import Waiting
from pliant.deployments.vision.tasks import Tasks, key
from pliant.formats.vision_task import TaskRef
from pliant.policies.vision.slo_batching import SloBatcher
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import ExactPolicy
from pliant.policies.vision.token_profile import TokenProfile
from pliant.simulation.vision.outcome import Fate, Outcome, Query
from pliant.simulation.vision.simulator import Simulation

PAPER = profiles.paper()
OVERLOAD = Trace((1.8, 1.8, 0.4, 1.8), seed=1)
SYSTEMS = (
    OURS,
    ALGORITHM_2,
    PETS,
    PETS_NEVER_EVICTING,
    *fixed(PAPER)[:2],
    *infaas([Choice(0.65, 0.5, 0.0)]),
    *slackfits(),
)


def queries(trace: Trace, profile: Profile = PAPER) -> list[Query]:
    return trace.queries(profile.per_s(), profile.roles)


def outcome(system: System, trace: Trace) -> Outcome:
    return system.simulation(PAPER).run(queries(trace))


class ScriptedDevice:
    """Takes as long as the profile says."""

    backend = "scripted"

    def __init__(self) -> None:
        self.batches: Counter[tuple[int, int]] = Counter()

    async def ready(self) -> None: ...

    async def run(self, images: Sequence[bytes], tasks: Sequence[str], gamma: int) -> list[NDArray[np.float32]]:
        await asyncio.sleep(PAPER.latency(gamma, len(images)))
        self.batches[gamma, len(images)] += 1
        return [np.zeros(2, np.float32)] * len(images)

    async def load(self, task: TaskRef) -> Mapping[int, float]:
        return PAPER.accuracies[task.name]

    async def unload(self, task: TaskRef) -> None:
        raise AssertionError(task)


async def on_the_engine(asked: Sequence[Query]) -> tuple[Counter[tuple[int, int]], float]:
    """Batches by gamma and rows, and the utility that is to be expected."""
    device = ScriptedDevice()
    tasks = Tasks(device)
    refs = {name: TaskRef(name, name, "1", 2, ()) for name in PAPER.roles}
    for ref in refs.values():
        await tasks.acquire(ref)
    names = {key(ref): name for name, ref in refs.items()}
    tokens = TokenProfile(PAPER.gammas, PAPER.latency, lambda task, gamma: PAPER.accuracy(names[str(task)], gamma))
    policy: ExactPolicy[Waiting] = ExactPolicy(tokens, TimePrice(tokens))
    engine = Engine(device, tasks, tokens, policy, len(asked))
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def ask(query: Query) -> float:
        await asyncio.sleep(start + query.arrival - loop.time())
        budget_s = query.deadline - query.arrival
        reply = await engine.classify(messages.Query(b"", refs[query.task], budget_s, query.utility))
        if isinstance(reply, Answer) and reply.fate == "in_time":
            return query.utility * PAPER.accuracies[query.task][reply.gamma]
        return 0.0

    earned = sum(await asyncio.gather(*map(ask, asked)))
    await engine.close()
    return device.batches, earned


def test_it_does_what_the_engine_does() -> None:
    asked = queries(Trace((1.5, 0.5), seed=2))
    batches, earned = virtual_loop.run(on_the_engine(asked))
    tokens = PAPER.tokens()
    simulated = Simulation(tokens, ExactPolicy(tokens, TimePrice(tokens)), PAPER.accuracy, noise=0.0).run(asked)
    assert simulated.expected == pytest.approx(earned, rel=0.005)
    ran = Counter((batch.gamma, batch.rows) for batch in simulated.batches)
    assert (ran & batches).total() > 0.5 * max(ran.total(), batches.total())


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_query_has_one_fate_and_a_run_repeats(system: System) -> None:
    first, second = outcome(system, OVERLOAD), outcome(system, OVERLOAD)
    assert sum(first.share(fate) for fate in Fate) == pytest.approx(1)
    computed = sum(batch.rows for batch in first.batches)
    assert computed == round((1 - first.share(Fate.EVICTED)) * len(queries(OVERLOAD)))
    assert (first.utility, first.batches) == (second.utility, second.batches)
    assert sum(first.blocks(4)) == pytest.approx(first.utility)
    assert first.cumulated(np.array([0.0, 10.0])).tolist() == pytest.approx([0, first.utility])


def test_nobody_is_evicted_where_that_is_not_done_and_late_instead() -> None:
    assert outcome(PETS_NEVER_EVICTING, OVERLOAD).share(Fate.EVICTED) == 0
    assert outcome(PETS_NEVER_EVICTING, OVERLOAD).share(Fate.LATE) > 0.1
    assert outcome(PETS, OVERLOAD).share(Fate.EVICTED) > 0.05
    assert outcome(PETS, OVERLOAD).share(Fate.LATE) < 0.01


def test_ours_earns_more_than_the_others_in_an_overload() -> None:
    ours = outcome(OURS, OVERLOAD).expected
    assert all(ours > outcome(system, OVERLOAD).expected for system in SYSTEMS[1:])


def test_models_follow_the_rate_and_changing_them_takes_time() -> None:
    rise = Trace((0.2,) * 3 + (1.5,) * 3, seed=0)
    (at_once,) = infaas([Choice(0.65, 0.5, 0.0)])
    gammas = outcome(at_once, rise).gammas()
    assert set(gammas) >= {0, 2}
    tokens = PAPER.models().tokens()
    asked = queries(rise)
    free = replace(at_once, load_s=())
    assert free.simulation(PAPER).run(asked).expected > outcome(at_once, rise).expected
    assert tokens.gammas == (0, 1, 2)


def test_slackfit_runs_the_earliest_deadlines_first_in_the_time_that_they_leave() -> None:
    tokens = PAPER.tokens()
    policy: SlackFitPolicy[Query] = SlackFitPolicy(tokens, buckets=32)
    asked = [Query(index, 0.0, 1.0 - index / 1000, 0.3, "CIFAR10", 0.5) for index in range(64)]
    batcher: SloBatcher[Query] = SloBatcher(64)
    for query in asked:
        batcher.add(query)
    urgent = asked[-1].deadline
    chosen = []
    for left_s in (0.9, 0.12, 0.06, 0.02):
        (step,) = policy.plan(batcher.batches, urgent - left_s)
        assert step.gamma is not None
        assert list(step.queries) == asked[::-1][: len(step.queries)]
        assert tokens.latency(step.gamma, len(step.queries)) <= left_s
        chosen.append((step.gamma, len(step.queries)))
    assert chosen[0] == (8, 64)
    assert chosen == sorted(chosen, reverse=True)
    assert policy.plan(batcher.batches, now=2.0) == []


def test_the_calibrated_load_is_what_gamma_0_answers_065_of_at_its_peak() -> None:
    peak = Trace((1.2,) * 20, seed=0).peaking_at(workload.CALIBRATED_PEAK)
    known = outcome(PETS, peak)
    answered = 1 - known.share(Fate.EVICTED) - known.share(Fate.LATE)
    assert answered == pytest.approx(0.65, abs=0.05)


def test_an_answer_is_given_once() -> None:
    asked = queries(Trace((0.1,), seed=0))
    known = Outcome(asked)
    known.ran(asked[:2], 0, [1.0, 0.0], ended=0.0)
    assert known.share(Fate.RIGHT) == known.share(Fate.WRONG) == 1 / len(asked)
    with pytest.raises(ValueError, match="answered twice"):
        known.ran(asked[:1], 0, [1.0], ended=0.0)


def test_loads_stay_between_the_ends_and_touch_both() -> None:
    for trace in (workload.synthetic(3000, 0), workload.replay(None, 3600, 0)):
        assert min(trace.loads) == pytest.approx(0.35, abs=0.02)
        assert max(trace.loads) == pytest.approx(1.2, abs=0.02)
    assert len(workload.replay(None, 100, 0).loads) == 100
