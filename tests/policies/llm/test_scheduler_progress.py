"""Where memory holds hardly more than one request and its adapter, somebody gets on whatever happens."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.scheduled_replica import STEP_S, FixedClasses, Replica, multi_queue

from pliant.policies.llm.adapter_cache import Eviction
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_order import Fifo, Queues, ShortestFirst


def tight(
    dice: random.Random, constant: bool, order: str, eviction: Eviction, prefetch: bool, patience_s: float
) -> None:
    """Serve random requests in memory of about one slot and one or two adapters; `Replica` sees whether all wait."""
    sizes = {name: dice.randint(1, 12) for name in "pqr"[: dice.randint(1, 3)]}
    slot = dice.randint(1, 12)
    total = slot + max(sizes.values()) + dice.choice((0, 0, 1, *sizes.values()))
    lanes = [(10 * (lane + 1), dice.randint(1, total)) for lane in range(dice.randint(1, 4))]
    queues: Queues[int, str] = multi_queue(*lanes, patience_s=patience_s)
    if order != "multi_queue":
        queues = Fifo() if order == "fifo" else ShortestFirst()
    slots, prompts = dice.randint(1, 3), dice.choice((1, 1, 20, 1000))
    replica = Replica(queues, total, lambda _: dice.choice((0.0, 0.5)), eviction, slots, prefetch, prompts=prompts)
    replica.broken = {name for name in sizes if dice.random() < 0.1}
    for key in range(dice.randint(5, 60)):
        adapter = dice.choice(("", *sizes))
        size = sizes.get(adapter, 0)
        predicted = dice.randint(1, 20)
        replica.answers[key] = max(1, int(predicted * dice.choice((0.1, 0.5, 1, 2, 5))))
        charge = slot if constant else dice.randint(1, total - size)
        replica.add(key, predicted, charge, adapter, size, prompt=dice.randint(1, 30))
        for _ in range(dice.choice((0, 0, 1, 3, 6))):
            replica.step()
            replica.scheduler.check()
        if replica.jobs and dice.random() < 0.1:
            replica.cancel(dice.choice(list(replica.jobs)))
    while replica.jobs:
        replica.step()
        assert replica.now < 10_000 * STEP_S


def test_whoever_is_booked_for_later_goes_first_when_nothing_runs() -> None:
    """Its adapter is in the way of the other, and the other's, which is wanted, in its own."""
    replica = Replica(multi_queue((10, 10), (99, 10), patience_s=5.0), total=10, slots=1)
    for key, adapter in enumerate("xy"):
        replica.add(key, adapter=adapter, bytes=4, output=1)
        replica.steps(8)
    replica.add(2, charge=2, output=3)
    replica.step()
    replica.add(3, charge=3, adapter="x", bytes=4, prompt=50)
    replica.step()
    replica.add(4, charge=3, adapter="y", bytes=4)
    replica.steps(2)
    assert replica.admitted == [0, 1, 2, 3]
    replica.steps(20)
    assert replica.admitted[4:] == [4]


def test_patience_ends_also_when_nothing_else_happens() -> None:
    """Beyond the new quota, the large one must spare the adapter that another waits for; until it goes first."""
    classes = FixedClasses(((10, 10), (99, 10)))
    replica = Replica(MultiQueue(classes, patience_s=5.0), total=20, slots=2)
    replica.add(0, adapter="w", bytes=8, output=1)
    replica.steps(8)
    replica.add(1, charge=2, output=1000)
    replica.add(2, charge=2, output=2)
    replica.step()
    replica.add(3, charge=12, prompt=50)
    replica.step()
    classes.quotas, classes.changed = ((0, 1), (99, 5)), True
    replica.add(4, adapter="w", bytes=8)
    replica.steps(20)
    assert replica.admitted == [0, 1, 2]
    replica.steps(6)
    assert replica.admitted == [0, 1, 2, 3]


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    constant=st.booleans(),
    order=st.sampled_from(("multi_queue", "multi_queue", "fifo", "sjf")),
    eviction=st.sampled_from(("compound", "lru", "none")),
    prefetch=st.booleans(),
    patience_s=st.sampled_from((0.0, 1.0, 5.0)),
)
@example(seed=2197, constant=False, order="multi_queue", eviction="lru", prefetch=True, patience_s=1.0)
@example(seed=5716, constant=True, order="multi_queue", eviction="none", prefetch=False, patience_s=1.0)
@example(seed=1962, constant=False, order="multi_queue", eviction="lru", prefetch=False, patience_s=5.0)
def test_somebody_gets_on_in_little_memory(
    seed: int, constant: bool, order: str, eviction: Eviction, prefetch: bool, patience_s: float
) -> None:
    """With wrong predictions, cancellations, and loads that fail."""
    tight(random.Random(seed), constant, order, eviction, prefetch, patience_s)
