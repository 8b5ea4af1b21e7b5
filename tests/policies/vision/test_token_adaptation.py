"""Plans for real batches: whose gamma is what, who is left out, and what comes of it in a queue (OTAS §III-D, §V)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from pliant.bench.vision.systems import FixedPolicy
from pliant.policies.vision import token_adaptation
from pliant.policies.vision.pareto_plan import best_plan
from pliant.policies.vision.plan_scope import HORIZON
from pliant.policies.vision.slo_batching import Batch, Batching, SloBatcher
from pliant.policies.vision.time_price import TimePrice
from pliant.policies.vision.token_adaptation import Algorithm2Policy, ExactPolicy, Policy, Step
from pliant.policies.vision.token_profile import TokenProfile

PER_S = {-20: 1300, -15: 1000, -10: 800, -5: 680, 0: 580, 2: 540, 4: 500, 8: 440}
"""Queries per second, as in figure 4b."""
ACCURACY = {
    "easy": {-20: 0.86, -15: 0.93, -10: 0.945, -5: 0.952, 0: 0.955, 2: 0.963, 4: 0.965, 8: 0.967},
    "hard": {-20: 0.70, -15: 0.79, -10: 0.81, -5: 0.82, 0: 0.825, 2: 0.845, 4: 0.85, 8: 0.855},
    "bare": {-20: 0.70, -15: 0.79, -10: 0.81, -5: 0.82, 0: 0.825},
    "unmerged": {0: 0.825},
}


@dataclass(frozen=True, eq=False)
class Image:
    arrival: float = 0.0
    deadline: float = 1.0
    utility: float = 0.3
    task: str = "easy"


def profile(*gammas: int) -> TokenProfile:
    return TokenProfile(
        gammas or tuple(PER_S),
        lambda gamma, rows: max(0.01, rows / PER_S[gamma]),
        lambda task, gamma: ACCURACY[str(task)].get(gamma),
    )


POLICIES: dict[str, Callable[[TokenProfile], Policy[Image]]] = {
    "exact": lambda known: ExactPolicy(known, TimePrice(known)),
    "myopic": lambda known: ExactPolicy(known, None),
    "algorithm_2": lambda known: Algorithm2Policy(known, beta=0),
    "algorithm_3": lambda known: Algorithm2Policy(known),
    "fixed": lambda known: FixedPolicy(known, 0),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def batch(*images: Image) -> Batch[Image]:
    made = Batch(images[0])
    for image in images[1:]:
        made.add(image)
    return made


def plan(policy: Policy[Image], *batches: Batch[Image], now: float = 10.0) -> list[Step[Image]]:
    """Well behind the initial stage."""
    policy.arrived(Image(0.0))
    return policy.plan(batches, now)


def many(rows: int, deadline: float, utility: float = 0.3, task: str = "easy") -> Batch[Image]:
    return batch(*(Image(10.0, deadline, utility, task) for _ in range(rows)))


@every_policy
def test_an_empty_queue_has_no_plan(policy: Callable[[TokenProfile], Policy[Image]]) -> None:
    assert policy(profile()).plan([], 0.0) == []


@every_policy
def test_batches_run_in_the_order_of_their_deadlines(policy: Callable[[TokenProfile], Policy[Image]]) -> None:
    late, soon = many(2, 11.0), many(2, 10.5)
    steps = plan(policy(profile()), late, soon)
    assert [step.batch for step in steps] == [soon, late]
    assert all(step.gamma is not None and list(step.queries) == list(step.batch.queries) for step in steps)


@every_policy
def test_queries_that_cannot_be_in_time_hold_up_no_others(policy: Callable[[TokenProfile], Policy[Image]]) -> None:
    hopeless, tight, patient = Image(deadline=10.005), Image(deadline=10.011), Image(deadline=11.0)
    (step,) = plan(policy(profile()), batch(patient, hopeless, tight))
    assert list(step.queries) == [tight, patient]
    assert step.gamma is not None
    assert plan(policy(profile()), batch(hopeless)) == []


@every_policy
def test_no_batch_gets_prompts_that_one_of_its_tasks_lacks(policy: Callable[[TokenProfile], Policy[Image]]) -> None:
    mixed = batch(Image(deadline=11.0), Image(deadline=11.0, utility=1.0, task="bare"))
    (step,) = plan(policy(profile()), mixed)
    assert step.gamma == 0


@every_policy
def test_who_lacks_the_fast_gammas_is_planned_with_those_it_has(
    policy: Callable[[TokenProfile], Policy[Image]],
) -> None:
    """64 of them would take 110 ms: as many run as can be in time, and the device does not stand still."""
    (step,) = plan(policy(profile()), many(64, 10.051, task="unmerged"))
    assert (step.gamma, len(step.queries)) == (0, 29)


def test_a_fixed_gamma_is_planned_with_its_own_time() -> None:
    (step,) = plan(FixedPolicy[Image](profile(), 8), many(64, 10.051))
    assert (step.gamma, len(step.queries)) == (8, 22)


@pytest.mark.parametrize("policy", [ExactPolicy[Image](profile(2, 8), None), FixedPolicy[Image](profile(2, 8), 8)])
def test_who_lacks_what_the_others_have_does_not_keep_them_waiting(policy: Policy[Image]) -> None:
    easy, bare = Image(deadline=11.0), Image(deadline=10.5, task="bare")
    (step,) = plan(policy, batch(bare, easy))
    assert (step.gamma, list(step.queries)) == (8, [easy])
    assert plan(policy, batch(bare)) == []


def test_the_tasks_of_late_queries_do_not_matter() -> None:
    late, easy = Image(deadline=10.005, task="unmerged"), Image(deadline=10.012)
    (step,) = plan(ExactPolicy[Image](profile(-20, 0), None), batch(late, easy, Image(deadline=10.012)))
    assert step.gamma is not None
    assert late not in step.queries
    assert len(step.queries) == 2


def test_of_a_long_queue_the_first_are_planned_and_nobody_waits_for_ever() -> None:
    known = profile()
    worthless = [many(1, 10.3 + index / 1000, utility=1e-9) for index in range(200)]
    dear, last = many(1, 10.31, utility=1.0), many(1, 20.0, utility=1e-9)
    steps = plan(ExactPolicy[Image](known, None), last, *worthless, dear)
    assert len(steps) == 202
    assert sum(step.gamma is not None for step in steps) <= HORIZON
    assert next(step.gamma for step in steps if step.batch is dear) is not None
    images = [Image(0.0, 0.3 + index / 50) for index in range(100)]
    batcher: SloBatcher[Image] = SloBatcher(100, Batching(most_rows=1))
    policy, now = ExactPolicy[Image](known, None), 0.0
    for image in images:
        assert batcher.add(image) is None
    while len(batcher):
        step = next(step for step in policy.plan(batcher.batches, now) if step.gamma is not None)
        batcher.take(step.batch, step.queries)
        now += known.latency(step.gamma or 0, 1)
        assert now <= step.queries[0].deadline


def test_a_queue_beyond_all_measure_is_looked_at_in_part() -> None:
    steps = plan(ExactPolicy[Image](profile(), None), *(many(1, 30.0 - index / 1000) for index in range(1000)))
    assert [step.batch.deadline for step in steps] == pytest.approx([29.001 + index / 1000 for index in range(256)])


def test_where_nothing_is_worth_its_time_one_plan_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    known, made = profile(), []
    monkeypatch.setattr(token_adaptation, "best_plan", lambda *problem: made.append(problem) or best_plan(*problem))
    exact: ExactPolicy[Image] = ExactPolicy(known, TimePrice(known))
    for arrival in range(8000):
        exact.arrived(Image(8 + arrival / 4000, 9 + arrival / 4000, utility=5.0))
    (step,) = exact.plan([many(64, 11.0, utility=0.01)], 10.0)
    assert step.gamma == -20
    assert len(made) == 1


@every_policy
def test_a_query_of_no_utility_is_answered_too(policy: Callable[[TokenProfile], Policy[Image]]) -> None:
    (step,) = plan(policy(profile()), many(1, 11.0, utility=0.0))
    assert step.gamma is not None


def test_rich_with_time_and_fast_without() -> None:
    exact = ExactPolicy[Image](profile(), None)
    assert [step.gamma for step in plan(exact, many(64, 11.0))] == [8]
    assert [step.gamma for step in plan(exact, many(64, 10.112))] == [0]
    assert [step.gamma for step in plan(exact, many(64, 10.05))] == [-20]
    steps = plan(exact, many(64, 10.15, 1.0), many(64, 10.2, 1.0), many(64, 10.21, 0.01))
    assert [step.gamma is None for step in steps] == [False, False, True]


def test_a_slower_device_gets_faster_gammas() -> None:
    slow = profile()
    slow.slowdown = 1.5
    assert [step.gamma for step in plan(ExactPolicy(slow, None), many(64, 10.112))] == [-15]


def test_time_has_a_price_when_more_come_than_the_richest_gamma_carries() -> None:
    known = profile()
    gammas = []
    for rate in (100, 800, 1800):
        exact: ExactPolicy[Image] = ExactPolicy(known, TimePrice(known))
        for arrival in range(2 * rate):
            exact.arrived(Image(8 + arrival / rate, 9 + arrival / rate))
        (step,) = exact.plan([many(64, 11.0)], 10.0)
        gammas.append(step.gamma)
    assert gammas[0] == 8
    assert gammas == sorted(gammas, key=lambda gamma: -(gamma or 0))
    assert gammas[2] is not None
    assert gammas[2] < 0


def test_algorithm_3_takes_the_first_seconds_and_short_queues() -> None:
    policy = Algorithm2Policy[Image](profile())
    for arrival in range(1200):
        policy.arrived(Image(arrival / 600))
    quick = [many(64, 11.0 + index) for index in range(6)]
    assert {step.gamma for step in policy.plan(quick, 1.99)} == {-15}
    assert {step.gamma for step in policy.plan(quick[:5], 2.0)} == {-15}
    assert {step.gamma for step in policy.plan(quick, 2.0)} == {8}


def test_what_is_worth_more_than_kappa_gets_the_greatest_gamma() -> None:
    calls = [(kappa, Algorithm2Policy[Image](profile(), kappa=kappa)) for kappa in (0.1, 0.8)]
    for _, policy in calls:
        for arrival in range(1200):
            policy.arrived(Image(arrival / 600))
    chosen = {kappa: policy.plan([many(8, 11.0, 0.3)], 2.0)[0].gamma for kappa, policy in calls}
    assert chosen == {0.1: 8, 0.8: -15}


def test_the_plan_is_worth_at_least_what_algorithm_2s_is() -> None:
    known = profile()
    random = np.random.default_rng(1)
    for _ in range(30):
        batches = [
            many(int(random.integers(1, 65)), 10 + random.uniform(0.02, 0.6), random.choice([0.01, 0.3, 1.0]))
            for _ in range(12)
        ]
        exact, written = (
            worth(plan(policy, *batches), known, 10.0)
            for policy in (ExactPolicy[Image](known, None), Algorithm2Policy[Image](known, beta=0))
        )
        assert exact >= written * (1 - 1e-9)


def worth(steps: Sequence[Step[Image]], known: TokenProfile, now: float) -> float:
    total = 0.0
    for step in steps:
        if step.gamma is not None:
            end = now + known.latency(step.gamma, len(step.queries))
            if end <= min(image.deadline for image in step.queries):
                now = end
                total += sum(image.utility * ACCURACY[image.task][step.gamma] for image in step.queries)
    return total


TYPES = [("easy", 0.6, 0.3), ("easy", 1.0, 0.01), ("hard", 0.6, 1.0), ("hard", 1.0, 0.2)]


def swinging(low: float, high: float, seconds: float = 12.0) -> list[Image]:
    """Random arrivals at a rate that swings between two multiples of what gamma 0 can do."""
    random = np.random.default_rng(5)
    images, now = [], 0.0
    while (now := now + random.exponential(1 / (high * PER_S[0]))) < seconds:
        rate = (low + high) / 2 + (high - low) / 2 * math.sin(2 * math.pi * now / 6)
        if random.random() < rate / high:
            task, allowed, utility = TYPES[random.integers(4)]
            images.append(Image(now, now + allowed, utility, task))
    return images


def earned(policy: Policy[Image], known: TokenProfile, images: list[Image]) -> float:
    """Share of all utility that one device earns; checks that everybody is answered in time or dropped, once."""
    batcher: SloBatcher[Image] = SloBatcher(limit=2048)
    now, total, answered, dropped = 0.0, 0.0, 0, 0
    coming = list(reversed(images))
    while coming or len(batcher):
        while coming and coming[-1].arrival <= now:
            policy.arrived(coming[-1])
            dropped += batcher.add(coming.pop()) is not None
        dropped += len(batcher.drop_late(now + known.shortest_s))
        step = next((step for step in policy.plan(batcher.batches, now) if step.gamma is not None), None)
        if step is None or step.gamma is None:
            now = max(now + 1e-3, coming[-1].arrival if coming and not len(batcher) else 0.0)
            continue
        batcher.take(step.batch, step.queries)
        now += known.latency(step.gamma, len(step.queries))
        answered += len(step.queries)
        total += sum(
            image.utility * ACCURACY[image.task][step.gamma] for image in step.queries if now <= image.deadline + 1e-9
        )
    assert answered + dropped == len(images)
    return total / sum(image.utility for image in images)


def test_tokens_are_traded_for_time_when_the_load_swings() -> None:
    known, images = profile(), swinging(0.35, 1.8)
    fixed = {gamma: earned(FixedPolicy(known, gamma), known, images) for gamma in (-15, 0, 8)}
    exact = earned(ExactPolicy(known, TimePrice(known)), known, images)
    assert exact > 1.15 * fixed[0]
    assert exact > 1.01 * max(fixed.values())
    assert exact > 1.01 * earned(Algorithm2Policy(known), known, images)


def test_it_is_as_accurate_as_can_be_when_few_come() -> None:
    known, images = profile(), swinging(0.2, 0.4)
    most = earned(FixedPolicy(known, 8), known, images)
    assert earned(ExactPolicy(known, TimePrice(known)), known, images) == pytest.approx(most, rel=2e-3)
