"""Tenants in a language model's replica: each gets its share of the slots, whatever order its own requests have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scripted_executor import EOS, SLOT_BYTES, ScriptedExecutor, byte_tokenizer

from pliant.deployments.llm.engine import Engine, Item
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.llm.waiting_room import AnswerScheduler, in_order
from pliant.deployments.serving.tenants import Tenant
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.decode_admission import LateError, QueueFullError
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.sampling import Sampling

SLOTS = 4
GREEDY, MODEST = Tenant("greedy"), Tenant("modest")
TOKENIZER = byte_tokenizer()
SCHEDULERS: dict[str, Callable[[], AnswerScheduler]] = {
    "fifo": lambda: in_order(SLOTS * SLOT_BYTES),
    "shortest": lambda: Scheduler(ShortestFirst(), AdapterCache(), SLOTS * SLOT_BYTES),
    "queues": lambda: Scheduler(MultiQueue(QueueClasses(1.0)), AdapterCache(), SLOTS * SLOT_BYTES, slots=SLOTS),
}


class World:
    """An engine on a clock that goes on whenever somebody looks."""

    def __init__(self, scheduler: AnswerScheduler | None = None, queue: int = 100) -> None:
        self.now = 0.0
        self.engine = Engine(
            ScriptedExecutor(SLOTS),
            TOKENIZER,
            (EOS,),
            queue,
            stall_s=0.05,
            clock=self._look,
            debug=True,
            scheduler=scheduler,
        )
        self.items: list[Item] = []
        self.ended: dict[str, float] = {}

    def _look(self) -> float:
        self.now += 0.005
        return self.now

    def add(self, id: str, tenant: Tenant, tokens: int = 10, within_s: float | None = None) -> None:
        prompt = tuple(range(1, 6))
        sampling = Sampling(seed=len(id))
        self.engine.add(
            Generation(id, prompt, tokens, sampling, ignore_eos=True, first_token_within_s=within_s, tenant=tenant)
        )

    def step(self) -> None:
        for id, item in self.engine.step():
            self.items.append((id, item))
            if not isinstance(item, Piece) or item.finish:
                self.ended[id] = self.now

    def run(self) -> None:
        while self.engine.busy:
            self.step()


@pytest.fixture(params=SCHEDULERS)
def world(request: pytest.FixtureRequest) -> World:
    return World(SCHEDULERS[request.param]())


def test_one_tenant_does_not_hold_up_another(world: World) -> None:
    for index in range(40):
        world.add(f"greedy {index}", GREEDY, tokens=40)
    for _ in range(10):
        world.step()
    for index in range(4):
        world.add(f"modest {index}", MODEST, tokens=40)
    world.run()
    order = sorted(world.ended, key=world.ended.__getitem__)
    assert len(order) == 44
    assert max(order.index(f"modest {index}") for index in range(4)) < 13, "after those that had slots, half of them"


def test_weights_share_the_slots(world: World) -> None:
    for index in range(30):
        world.add(f"light {index}", Tenant("light", 1.0))
        world.add(f"heavy {index}", Tenant("heavy", 3.0))
    world.run()
    order = sorted(world.ended, key=world.ended.__getitem__)
    assert 21 <= sum(name.startswith("heavy") for name in order[:32]) <= 27


def test_within_its_share_a_request_is_let_in_though_many_wait() -> None:
    world = World()
    world.add("first", GREEDY)
    world.run()  # from now on it is known how long a step takes
    for index in range(40):
        world.add(f"greedy {index}", GREEDY, tokens=40)
    world.step()
    with pytest.raises(LateError):
        world.add("late", GREEDY, within_s=1.0)
    world.add("modest", MODEST, within_s=1.0)
    world.run()
    assert [item.finish for id, item in world.items if id == "modest" and isinstance(item, Piece)][-1] == "length"


def test_a_full_queue_refuses_who_is_furthest_over_its_share() -> None:
    world = World(queue=6)
    for index in range(10):
        world.add(f"greedy {index}", GREEDY)
    with pytest.raises(QueueFullError):
        world.add("greedy 10", GREEDY)
    world.add("modest 0", MODEST)
    world.add("modest 1", MODEST)
    world.run()
    refused = [(id, item.reason) for id, item in world.items if isinstance(item, QueueFullError)]
    assert [id for id, _ in refused] == ["greedy 9", "greedy 8"]
    assert all("more than its share" in reason for _, reason in refused)
    assert len(world.ended) == 12


def test_a_tenant_pays_for_what_it_got_and_not_for_what_was_predicted() -> None:
    world = World()
    for index in range(12):
        world.add(f"cut short {index}", Tenant("cut short"), tokens=50)
        world.add(f"whole {index}", Tenant("whole"), tokens=10)
    seen: set[str] = set()
    while world.engine.busy:
        world.step()
        for id, _ in world.items:
            if id.startswith("cut short") and id not in seen:
                seen.add(id)
                world.engine.cancel(id)
    order = list(dict.fromkeys(id for id, _ in world.items))
    begun = order[:16]
    assert sum(id.startswith("cut short") for id in begun) >= 10, "each cost a token of an answer, and its prompt"
