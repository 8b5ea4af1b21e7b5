"""Steps: everybody gets their own tokens whoever made way, nobody starves, and prompts leave answers their time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, count

import pytest

from pliant.policies.llm.idle_memory import Root
from pliant.policies.llm.passes import Order, Work
from pliant.policies.llm.step_requests import Prompt, Step
from pliant.policies.llm.step_scheduler import StepScheduler
from pliant.simulation.llm.one_pass import Keep, memory_of


class Machine:
    """A pass takes 10 ms and 0.1 ms for each token beyond 100; a page is a byte, and loads as fast as 100 of them."""

    def pass_s(self, work: Work) -> float:
        return max(0.01, work.tokens * 1e-4) + (work.stored + work.pairs) * 1e-7

    def prompt_s(self, tokens: int, before: int) -> float:
        return tokens * 1e-4

    def load_s(self, bytes: int) -> float:
        return bytes * 1e-2


class Engine:
    """Does what steps say in a memory of its own: what a page holds is by which tokens it was computed."""

    def __init__(
        self, pages: int, page_tokens: int = 4, keep: Keep = "joint", order: Order = "shortest", rows: int = 16
    ):
        memory = memory_of(pages, 1, page_tokens, Machine(), keep)
        self.scheduler: StepScheduler[int, str] = StepScheduler(memory, Machine(), rows, order)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, Prompt[int, str]] = {}
        self.lengths: dict[int, int] = {}
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.steps: list[Step[int, str]] = []
        self.loading: list[tuple[float, str]] = []
        self._held: dict[tuple[int, int], int] = {}
        self._contents: dict[int, list[int]] = {}
        self._keys = count()

    def add(
        self,
        tokens: Sequence[int],
        length: int,
        predicted: int | None = None,
        adapter: str | None = None,
        bytes: int = 0,
        tpot_s: float = math.inf,
        most: int = 20,
    ) -> int:
        key = next(self._keys)
        prompt = Prompt(key, Root(adapter), tokens, predicted or length, max(length, most), bytes, self.now, tpot_s)
        self.scheduler.add(prompt, self.now)
        self.tokens[key], self.prompts[key], self.lengths[key] = list(tokens), prompt, length
        return key

    def step(self) -> bool:
        """One pass; whether anything was done."""
        while self.loading and self.loading[0][0] <= self.now:
            self.scheduler.loaded(self.loading.pop(0)[1], self.now)
        step = self.scheduler.schedule(self.now)
        self.scheduler.check()
        self.steps.append(step)
        for adapter in step.load:
            self.loading.append((self.now + 0.03, adapter))
        pages, size = self.scheduler.memory.pages, self.scheduler.memory.pages.page_tokens
        for source, target, slots in step.copies:
            for slot in range(slots):
                self._held[target, slot] = self._held[source, slot]
        work, drawn = Work(), {}
        for key, tokens in step.rows.items():
            root, contents = self.prompts[key].root, self._contents_of(key)
            table, start = pages.table(key), pages.computed(key)
            assert root.adapter is None or self.scheduler.memory.adapters.state(root.adapter) == "resident"
            for at in range(start, start + tokens):
                self._held[table[at // size], at % size] = contents[at]
            for at in range(start + tokens):
                assert self._held[table[at // size], at % size] == contents[at], "another's page"
            work = work.plus(Work(tokens, start))
            if start + tokens == len(contents):
                drawn[key] = next_token(contents[-1])
        if not step.rows:
            self.now = self.loading[0][0] if self.loading else self.now
            return bool(step.load or self.loading)
        self.now += Machine().pass_s(work)
        self.scheduler.finish(step, drawn, self.now)
        for key, token in drawn.items():
            self.tokens[key].append(token)
            self.first.setdefault(key, self.now)
            if len(self.tokens[key]) - len(self.prompts[key].tokens) == self.lengths[key]:
                self.scheduler.ended(key, self.now)
                self.ended[key] = self.now
        self.scheduler.check()
        return True

    def run(self) -> None:
        """Until all are answered, each as if it were alone."""
        while len(self.ended) < len(self.tokens):
            assert self.step(), "nothing runs, nothing loads, and somebody waits"
        for key, prompt in self.prompts.items():
            answer = []
            content = content_of(prompt.root, prompt.tokens)[-1]
            for _ in range(self.lengths[key]):
                answer.append(next_token(content))
                content = hash((content, answer[-1]))
            assert self.tokens[key] == [*prompt.tokens, *answer]

    def _contents_of(self, key: int) -> list[int]:
        """What each token's keys and values are made of: it, and all before it."""
        contents = self._contents.setdefault(key, content_of(self.prompts[key].root, self.tokens[key]))
        for token in self.tokens[key][len(contents) :]:
            contents.append(hash((contents[-1], token)))
        return contents


def content_of(root: Root[str], tokens: Sequence[int]) -> list[int]:
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=hash(root)))[1:]


def next_token(content: int) -> int:
    return content % 3


@pytest.mark.parametrize("keep", ["joint", "none"])
@pytest.mark.parametrize("order", ["shortest", "fifo"])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_everybody_is_answered_as_if_alone(seed: int, order: Order, keep: Keep) -> None:
    rng = random.Random(seed)
    engine = Engine(rng.choice((14, 20, 40)), rng.choice((1, 2, 4)), keep, order, rng.choice((1, 3, 16)))
    most = engine.scheduler.memory.pages.count * engine.scheduler.memory.pages.page_tokens
    for _ in range(60):
        adapter = rng.choice((None, "a", "b", "c"))
        bytes = 0 if adapter is None else 1 + ord(adapter) - ord("a")
        longest = most - 20 - bytes * engine.scheduler.memory.pages.page_tokens
        if longest < 2:
            continue
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, min(40, longest)))]
        engine.add(prompt, rng.randrange(1, 20), rng.randrange(1, 20), adapter, bytes, rng.choice((0.02, math.inf)))
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.05:
            alive = [key for key in engine.tokens if key not in engine.ended]
            if alive:
                engine.scheduler.cancel(alive[0], engine.now)
                for known in (engine.tokens, engine.prompts, engine.lengths):
                    del known[alive[0]]
    engine.run()
    memory = engine.scheduler.memory
    assert memory.free + memory.idle + pinned(engine) == memory.total


def pinned(engine: Engine) -> int:
    """Bytes of the adapter that was kept for the last that waited."""
    kept, uses = engine.scheduler._kept, engine.scheduler.memory.adapters.uses(engine.now)
    return int(uses[kept].bytes) if kept is not None else 0


def test_short_prompts_join_the_pass_of_a_long_one() -> None:
    engine = Engine(2000)
    live = engine.add([1], 200, tpot_s=0.02)
    engine.step()
    long = engine.add(list(range(5000)), 2)
    engine.step()
    short = engine.add(list(range(7000, 7050)), 2)
    engine.step()
    assert set(engine.steps[1].rows) == {live, long}
    assert set(engine.steps[2].rows) == {live, long, short}
    assert short in engine.first
    assert long not in engine.first


def test_a_pass_is_as_long_as_answers_can_spare() -> None:
    engine = Engine(4000)
    for _ in range(3):
        engine.add([1], 400, tpot_s=0.03)
    engine.step()
    engine.add(list(range(9000)), 2)
    engine.run()
    chunked = [step for step in engine.steps if max(step.rows.values(), default=0) > 4]
    assert len(chunked) > 20
    for key in range(3):
        assert (engine.ended[key] - engine.first[key]) / 399 <= 0.03 + 1e-9


def test_long_prompts_go_on_though_short_ones_keep_coming() -> None:
    engine = Engine(4000, 64)
    long = engine.add(list(range(8000)), 2)
    passed = 0
    for number in range(400):
        if long in engine.ended:
            break
        engine.add([number] * 2600, 1)
        engine.step()
        passed += long not in engine.steps[-1].rows
    assert long in engine.ended
    assert passed > 10
    assert engine.scheduler.waiting > 10, "more comes than can be computed"


def test_what_is_short_of_pages_has_the_youngest_make_way_and_none_is_lost() -> None:
    engine = Engine(12, 4)
    keys = [engine.add([number] * 7, 19, predicted=1) for number in range(3)]
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert keys[0] not in {key for step in engine.steps for key in step.preempted}, "the oldest always goes on"


def test_predictions_that_hold_need_no_preemption() -> None:
    engine = Engine(12, 4)
    for number in range(6):
        engine.add([number] * 7, 17)
    engine.run()
    assert engine.scheduler.preemptions == 0
    assert max(len(step.rows) for step in engine.steps) >= 2


def test_who_would_take_long_to_compute_again_keeps_its_pages_while_another_is_about_to_end() -> None:
    engine = Engine(136, 4)
    engine.add([9] * 8, 20)
    engine.step()
    middle = engine.add([1, 1, 1], 20, predicted=19)
    young = engine.add(list(range(480)), 20, predicted=1)
    engine.run()
    sat_out = [step for step in engine.steps if middle not in step.rows and young in step.rows]
    assert sat_out
    assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize("count", range(4, 9))
def test_younger_ones_that_share_all_they_have_make_way_too(count: int) -> None:
    engine = Engine(count, 4)
    oldest = engine.add([9] * 4, 12, predicted=1, most=12)
    engine.step()
    one = engine.add([1] * 6, 3, predicted=1, most=3)
    engine.step()
    if one in engine.scheduler._running:
        fork(engine, one)
    engine.run()
    assert oldest not in {key for step in engine.steps for key in step.preempted}


def test_where_the_next_is_blocked_by_the_adapter_of_the_oldest_that_one_begins() -> None:
    engine = Engine(24, 16)
    engine.add([1], 1, adapter="a", bytes=10)
    engine.run()
    oldest = engine.add(list(range(200)), 2, adapter="a", bytes=10)
    engine.now += 1e-3
    other = engine.add([1], 2, adapter="b", bytes=15)
    engine.run()
    assert engine.ended[oldest] < engine.ended[other]


def test_parallel_requests_compute_a_common_prompt_once() -> None:
    engine = Engine(400)
    common = list(range(400))
    for number in range(8):
        engine.add([*common, 1000 + number, 1], 3)
    engine.run()
    assert sum(sum(step.rows.values()) for step in engine.steps) < 400 + 8 * 12


def fork(engine: Engine, key: int) -> None:
    """Another answer, alike, that begins where `key` is."""
    child = next(engine._keys)
    engine.scheduler.fork(key, child, engine.now)
    engine.tokens[child], engine.lengths[child] = engine.tokens[key].copy(), engine.lengths[key]
    engine.prompts[child] = engine.prompts[key]._replace(key=child)


def test_a_fork_goes_on_with_what_is_there() -> None:
    engine = Engine(40)
    one = engine.add(list(range(10)), 5)
    engine.step()
    fork(engine, one)
    engine.run()
    assert sum(engine.steps[1].rows.values()) == 2
    assert len(engine.steps[1].copies) == 1


def test_a_load_that_fails_lets_its_requests_go() -> None:
    engine = Engine(20)
    key = engine.add([1, 2], 3, adapter="a", bytes=2)
    assert engine.scheduler.schedule(0.0).load == ["a"]
    assert engine.scheduler.load_failed("a") == [key]
    assert engine.scheduler.waiting == 0
    engine.scheduler.check()


def test_what_never_fits_is_refused() -> None:
    engine = Engine(10)
    with pytest.raises(ValueError, match="may need 10 pages of 1 bytes, and 3 bytes for its adapter, but there are 10"):
        engine.add(list(range(20)), 20, adapter="a", bytes=3)
    known = engine.add([1], 1)
    with pytest.raises(ValueError, match="waits or runs already"):
        engine.scheduler.add(engine.prompts[known], 0.0)
    with pytest.raises(ValueError, match="must be positive"):
        StepScheduler(engine.scheduler.memory, Machine(), 0)
