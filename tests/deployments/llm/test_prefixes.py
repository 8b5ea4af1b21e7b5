"""What was computed of prompts and answers serves those that begin alike, and nobody reads what is not theirs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.foretold import Foretold
from support.scripted_executor import (
    EOS,
    SLOT_BYTES,
    ScriptedAdapters,
    ScriptedExecutor,
    adapter,
    byte_tokenizer,
    expected,
)

from pliant.deployments.llm.adapter_loader import AdapterLoader
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving.tenants import Tenant
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.pages import PagesError
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues, ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.sampling import Sampling

TOKENIZER = byte_tokenizer()
MAX_LENGTH = 64
PAGE = 4


class Served:
    """An engine that checks itself, and the tokens of all answers."""

    def __init__(self, slots: int = 4, pipelined: bool = False, arena_bytes: int | None = None, **options: Any) -> None:
        self.executor = ScriptedExecutor(slots, MAX_LENGTH, pipelined, arena_bytes=arena_bytes, page=PAGE)
        self.executor.arena_bytes = arena_bytes or self.executor.arena_bytes
        self.now = 0.0
        self.engine = Engine(
            *(self.executor, TOKENIZER, (EOS,), 100, options.pop("stall_s", 10.0), lambda: self.now),
            debug=True,
            loader=AdapterLoader(ScriptedAdapters()),
            **options,
        )
        self.asked: dict[str, Generation] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        """What each answer said was there of its prompt."""

    def add(self, *generations: Generation) -> None:
        for wanted in generations:
            self.engine.add(wanted)
            self.asked[wanted.id], self.tokens[wanted.id] = wanted, []

    def cancel(self, id: str) -> None:
        self.engine.cancel(id)
        self.asked.pop(id, None)

    def step(self) -> None:
        self.now += 0.001
        for id, item in self.engine.step():
            assert isinstance(item, Piece), item
            if not self.tokens[id]:
                assert item.cached is not None
                assert 0 <= item.cached <= len(self.asked[id].prompt)
                self.cached[id] = item.cached
            else:
                assert item.cached is None
            self.tokens[id] += item.tokens

    def run(self) -> None:
        """Until all have ended, each as if it had been alone."""
        while self.engine.busy:
            self.step()
        if self.engine.failure:
            raise self.engine.failure
        for id, wanted in self.asked.items():
            assert self.tokens[id] == expected(wanted, MAX_LENGTH)

    def answer(self, *generations: Generation) -> int:
        """Answer them; returns the tokens of their prompts that were computed."""
        before = self.computed
        self.add(*generations)
        self.run()
        return self.computed - before

    @property
    def computed(self) -> int:
        return sum(len(prefill.ids) for step in self.executor.steps for prefill in step.prefills)


def generation(id: str, prompt: Sequence[int], max_tokens: int = 3, seed: int = 0, **options: Any) -> Generation:
    return Generation(id, tuple(prompt), max_tokens, Sampling(seed=seed), ignore_eos=True, **options)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_second_turn_computes_what_is_new(pipelined: bool) -> None:
    served = Served(pipelined=pipelined)
    assert served.answer(generation("first", range(20), max_tokens=15)) == 20
    said = (*range(20), *served.tokens["first"])
    assert served.answer(generation("second", (*said, 98, 99))) == 37 - 32
    assert served.cached == {"first": 0, "second": 32}
    memory = served.engine.report()["memory"]
    assert (memory["hit"], memory["missed"]) == (32, 25)
    assert (memory["live"], memory["idle"]) == (0, 9)


def test_choices_of_one_prompt_compute_it_once() -> None:
    served = Served()
    choices = [generation(str(seed), range(30), seed=seed) for seed in range(4)]
    assert served.answer(*choices) == 30 + 3 * 2
    assert sorted(served.cached.values()) == [0, 28, 28, 28]
    assert len({tuple(tokens) for tokens in served.tokens.values()}) > 1


def test_an_answer_that_came_with_tokens_says_what_was_there_of_its_prompt() -> None:
    served = Served()
    served.answer(generation("first", range(20), max_tokens=12))
    said = tuple(served.tokens["first"])
    served.add(
        generation("later", range(20), max_tokens=14, generated=said),
        generation("elsewhere", range(30, 50), max_tokens=14, generated=said),
    )
    while served.engine.busy:
        served.step()
    assert served.cached == {"first": 0, "later": 20, "elsewhere": 0}


def test_those_that_come_later_share_with_one_that_still_runs() -> None:
    served = Served()
    served.add(generation("system", range(30), max_tokens=20))
    for _ in range(3):
        served.step()
    served.add(generation("one", (*range(28), 90, 91)), generation("other", (*range(16), 92)))
    served.run()
    assert served.computed == 30 + 2 + 1


@pytest.mark.parametrize(("share", "computed"), [(False, 20), (True, 4)])
def test_tenants_are_apart_unless_it_says_otherwise(share: bool, computed: int) -> None:
    served = Served(share_prefixes=share)
    served.answer(generation("a", range(20), tenant=Tenant("a")))
    assert served.answer(generation("again", range(20), tenant=Tenant("a"))) == 4
    assert served.answer(generation("b", range(20), tenant=Tenant("b"))) == computed


def test_an_adapter_s_prefixes_are_its_own() -> None:
    served = Served(arena_bytes=8 * SLOT_BYTES)
    one, other = adapter("one"), adapter("other")
    for ref in (None, one, other):
        name = ref.name if ref else "base"
        assert served.answer(generation(name, range(20), adapter=ref)) == 20
        assert served.answer(generation(f"{name} again", range(20), adapter=ref)) == 4
    served.engine.close()


def test_what_is_kept_makes_room_for_whoever_runs() -> None:
    served = Served(slots=2)
    for number in range(12):
        prompt = range(number, number + 40)
        assert served.answer(generation(str(number), prompt)) == 40
    memory = served.engine.report()["memory"]
    assert memory["evicted"] > 0
    assert 0 < memory["idle"] <= memory["pages"]
    served.add(*(generation(f"long {number}", (number,) * 50, max_tokens=14) for number in range(2)))
    served.run()


def test_adapters_and_prefixes_compete_for_the_same_memory() -> None:
    """An adapter that is used all the time stays, whatever prompts come; one that is not makes room for prefixes."""
    served = Served(slots=2, arena_bytes=4 * SLOT_BYTES)
    often, seldom = adapter("often", size=64), adapter("seldom", size=64)
    served.answer(generation("seldom", range(4), adapter=seldom))
    for number in range(40):
        served.now += 1.0
        served.answer(generation(f"often {number}", range(8), adapter=often))
        served.answer(generation(f"base {number}", range(number, number + 30)))
    report = served.engine.report()
    assert report["adapters"]["resident"] == ["often"]
    assert report["adapters"]["evictions"] == {"memory": 1}
    assert report["memory"]["idle"] > 0
    served.engine.close()


def test_a_rehearsal_leaves_no_prefix_behind() -> None:
    served = Served()
    served.engine.rehearse()
    memory = served.engine.report()["memory"]
    assert (memory["idle"], memory["live"], memory["hit"], memory["missed"]) == (0, 0, 0, 0)


def test_as_many_run_as_are_predicted_to_fit() -> None:
    """Eight requests that may each get a whole slot, in the memory of two, and are foretold to have short answers."""
    served = Served(slots=8, arena_bytes=2 * SLOT_BYTES, predictor=Foretold(3))
    served.add(*(generation(str(number), (number,) * 8, max_tokens=56) for number in range(8)))
    served.step()
    assert (served.engine.report()["live"], served.engine.report()["waiting"]) == (8, 0)


@pytest.mark.parametrize("order", ["fifo", "sjf", "multi_queue"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_where_answers_get_longer_than_predicted_those_that_came_last_make_way(order: str, pipelined: bool) -> None:
    arena = 2 * SLOT_BYTES
    queues: dict[str, Queues[Answer, AdapterRef]] = {
        "fifo": Fifo(),
        "sjf": ShortestFirst(),
        "multi_queue": MultiQueue(QueueClasses(1.0)),
    }
    scheduler = Scheduler(queues[order], AdapterCache[AdapterRef]("joint"), arena, slots=8)
    served = Served(8, pipelined, arena, scheduler=scheduler, predictor=Foretold(3))
    names = [str(number) for number in range(8)]
    for number, name in enumerate(names):
        served.now += 0.001
        served.add(generation(name, (number,) * 8, max_tokens=40))
    ended: list[str] = []
    while served.engine.busy:
        before = len(served.tokens["0"])
        served.step()
        ended += [name for name in names if len(served.tokens[name]) == 40 and name not in ended]
        if "0" not in ended and len(ended) + before:
            assert len(served.tokens["0"]) > before or pipelined, "the first goes on in every step"
    served.run()
    assert ended[0] == "0"
    report = served.engine.report()
    assert report["preempted"] > 0
    assert report["memory"]["hit"] > 0, "what they had is taken over again"


def test_who_has_computed_least_for_its_memory_makes_way() -> None:
    """The middle one is at its prompt when the first gets longer than predicted; the last has its answer begun."""
    served = Served(slots=3, arena_bytes=26 * PAGE, predictor=Foretold(4), stall_s=1e-9)
    served.add(generation("first", range(100, 104), max_tokens=50))
    served.step()
    served.add(generation("middle", range(1, 56), max_tokens=8))
    served.step()
    served.add(generation("last", range(60, 90), max_tokens=30))
    while not served.engine.report()["preempted"]:
        before = len(served.tokens["last"])
        assert served.engine.busy
        served.step()
    assert len(served.tokens["last"]) > before
    assert not served.tokens["middle"]
    served.run()


def test_an_adapter_stays_until_the_iteration_is_through_that_computes_for_who_makes_way() -> None:
    """What one needs more is more than the other's page, so that the adapter of that goes, too."""
    ref = adapter("only", size=64)
    served = Served(slots=3, pipelined=True, arena_bytes=2 * SLOT_BYTES, predictor=Foretold(1))
    served.answer(generation("before", (1,), max_tokens=1, adapter=ref))
    served.add(generation("long", range(48), max_tokens=16), generation("short", range(60, 65), max_tokens=20))
    served.step()
    served.step()
    served.add(generation("last", (2,), max_tokens=30, adapter=ref))
    served.run()
    report = served.engine.report()
    assert report["preempted"] > 0
    assert report["adapters"]["evictions"]["memory"] > 0
    served.engine.close()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 6),
    pipelined=st.booleans(),
    stall_s=st.sampled_from((0.001, 0.01, 10.0)),
    share=st.booleans(),
)
def test_conversations_in_little_memory_are_answered_as_if_alone(
    seed: int, slots: int, pipelined: bool, stall_s: float, share: bool
) -> None:
    """Turns of conversations, choices and cancellations, of tenants and adapters, where prefixes come and go."""
    dice = random.Random(seed)
    arena = int(dice.uniform(1.8, slots + 2) * SLOT_BYTES)
    predictor = Foretold(dice.choice((1, 6, 30)))
    served = Served(slots, pipelined, arena, stall_s=stall_s, share_prefixes=share, predictor=predictor)
    refs: list[AdapterRef | None] = [None, adapter("p", 16), adapter("q", 40)]
    for number in range(25):
        opening = [dice.choice((7, 8))] * dice.choice((4, 9, 16))
        ended = [one for one in served.asked.values() if len(served.tokens[one.id]) == one.max_tokens]
        if ended and dice.random() < 0.5:
            last = dice.choice(ended)
            opening = [*last.prompt, *served.tokens[last.id]]
        prompt = [*opening, *(dice.randrange(9) for _ in range(dice.randint(0, 6)))][: MAX_LENGTH - 20]
        options = {"adapter": dice.choice(refs), "tenant": Tenant(dice.choice("ab"))}
        for choice in range(dice.choice((1, 1, 1, 3))):
            served.add(generation(f"{number}-{choice}", prompt, dice.randint(1, 18), seed=choice, **options))
        for _ in range(dice.choice((0, 1, 4, 12))):
            served.step()
        if dice.random() < 0.1:
            open_ = [id for id, one in served.asked.items() if len(served.tokens[id]) < one.max_tokens]
            served.cancel(dice.choice(open_)) if open_ else None
    served.run()
    served.engine.close()
    report = served.engine.report()
    assert (report["live"], report["memory"]["live"]) == (0, 0)


def test_the_engine_s_check_sees_a_page_that_two_write_to() -> None:
    served = Served()
    served.add(generation("a", range(10)), generation("b", range(50, 60)))
    served.step()
    pages = served.engine._steps.memory.pages
    one, other = pages._requests.values()
    other.table[-1] = one.table[-1]
    with pytest.raises(PagesError):
        served.engine._steps.memory.check()
