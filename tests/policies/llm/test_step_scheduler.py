"""Plans: everybody gets their own tokens whoever made way, nobody starves, and what is shared is computed once."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Literal

import pytest

from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.idle_memory import IdleMemory, Root
from pliant.policies.llm.pages import Pages
from pliant.policies.llm.passes import Order
from pliant.policies.llm.queue_order import Fifo, Queues, ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.policies.llm.step_requests import Plan, Prompt, Row
from pliant.policies.llm.step_scheduler import StepScheduler
from tests.support.scheduled_replica import multi_queue

STEP_S = 0.01
STEPS = int(os.environ.get("PLIANT_SCHEDULED_STEPS", "60"))
"""Requests of a random run; more are tried by hand."""

Waits = Literal["multi_queue", "fifo", "sjf"]


class Costs:
    """A page is a byte, and loads as fast as 100 tokens of a prompt are computed."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s

    def prompt_s(self, tokens: int, before: int) -> float:
        return tokens * self.token_s

    def load_s(self, bytes: int) -> float:
        return bytes * 100 * self.token_s


class Text:
    """Of one request; what a page holds of it is made of all tokens up to there, and of whose they are."""

    def __init__(self, root: Root[str], tokens: Sequence[int], length: int) -> None:
        self.root, self.prompt, self.length = root, len(tokens), length
        self.tokens = list(tokens)
        self.contents = list(accumulate(tokens, lambda before, token: hash((before, token)), initial=hash(root)))[1:]

    def queued(self) -> Sequence[int]:
        return self.tokens

    def known(self, start: int = 0) -> list[int]:
        return self.tokens[start:]

    @property
    def answered(self) -> int:
        return len(self.tokens) - self.prompt

    def draw(self) -> None:
        self.tokens.append(self.contents[-1] % 3)
        self.contents.append(hash((self.contents[-1], self.tokens[-1])))


def queues(waits: Waits, pages: int) -> Queues[int, str]:
    if waits == "multi_queue":
        return multi_queue((4, pages // 2), (1000, pages - pages // 2), patience_s=0.05)
    return Fifo() if waits == "fifo" else ShortestFirst()


class Engine:
    """Does what plans say, in a memory of its own."""

    def __init__(
        self,
        pages: int,
        page_tokens: int = 4,
        keep: bool = True,
        order: Order = "shortest",
        rows: int = 16,
        waits: Waits = "fifo",
        budget: int = 64,
        token_s: float = 1e-4,
    ) -> None:
        self.pages: Pages[int, Root[str]] = Pages(pages, page_tokens)
        cache: AdapterCache[str] = AdapterCache("joint" if keep else "none")
        memory = IdleMemory(self.pages, 1, pages, cache, Costs(token_s), keep)
        admission: Scheduler[int, str] = Scheduler(queues(waits, pages), cache, pages, slots=min(rows, pages))
        self.scheduler: StepScheduler[int, str] = StepScheduler(memory, admission, Costs(token_s), order)
        self.rows, self.budget, self.now = rows, budget, 0.0
        self.texts: dict[int, Text] = {}
        self.prompts: set[int] = set()
        self.decoding: set[int] = set()
        self.ended: dict[int, float] = {}
        self.plans: list[Plan[int, str]] = []
        self.loading: list[tuple[float, str]] = []
        self._held: dict[tuple[int, int], int] = {}
        self._keys = count()

    def add(
        self,
        tokens: Sequence[int],
        length: int,
        predicted: int | None = None,
        adapter: str | None = None,
        bytes: int = 0,
        most: int = 20,
    ) -> int:
        key = next(self._keys)
        self.now += 1e-6
        text = Text(Root(adapter), tokens, length)
        size = len(tokens) + max(length, most)
        prompt = Prompt(key, text, text.root, len(tokens), predicted or length, size, self.now, bytes)
        self.scheduler.add(prompt, self.scheduler.job(prompt), self.now)
        self.texts[key] = text
        return key

    def step(self) -> bool:
        """One iteration; whether anything was done."""
        while self.loading and self.loading[0][0] <= self.now:
            self.scheduler.admission.loaded(self.loading.pop(0)[1], self.now)
        full = [row for row in map(self._row, sorted(self.decoding)) if self._is_full(row)]
        running = len(self.prompts) + len(self.decoding)
        plan = self.scheduler.schedule(self.now, self.rows - running, self.budget, full, STEP_S)
        self.scheduler.check()
        self.plans.append(plan)
        self.loading += [(self.now + 3 * STEP_S, adapter) for adapter in plan.load]
        self.prompts -= set(plan.put_back)
        self.decoding -= set(plan.put_back)
        self.prompts |= set(plan.admit)
        moved = {place: content for place, content in self._held.items() if place[0] in dict(plan.moves)}
        for (page, slot), content in moved.items():
            self._held[dict(plan.moves)[page], slot] = content
        going = self.decoding - set(plan.sit_out)
        done = bool(plan.chunks or going or plan.put_back or self.loading)
        for key, tokens in plan.chunks:
            self._compute(key, self.pages.computed(key), tokens)
        for key in going:
            self._compute(key, len(self.texts[key].tokens) - 1, 1)
        self.scheduler.computed(plan, self.now)
        self.now += STEP_S
        whole = {key for key, _ in plan.chunks if not self.pages.left(key)}
        self.prompts -= whole
        self.decoding |= whole
        for key in going | whole:
            self._draw(key)
        self.scheduler.check()
        return done

    def _row(self, key: int) -> Row[int]:
        return Row(key, len(self.texts[key].tokens) - 1)

    def _is_full(self, row: Row[int]) -> bool:
        return row.stored >= len(self.pages.table(row.key)) * self.pages.page_tokens

    def _compute(self, key: int, start: int, tokens: int) -> None:
        text, table, size = self.texts[key], self.pages.table(key), self.pages.page_tokens
        adapter = text.root.adapter
        assert adapter is None or self.scheduler.admission.cache.state(adapter) == "resident"
        for at in range(start, start + tokens):
            self._held[table[at // size], at % size] = text.contents[at]
        for at in range(start + tokens):
            assert self._held[table[at // size], at % size] == text.contents[at], "another's page"

    def _draw(self, key: int) -> None:
        text = self.texts[key]
        text.draw()
        self.scheduler.admission.generated(key, text.answered)
        if text.answered == text.length:
            self.decoding.remove(key)
            self.scheduler.halt(Row(key, len(text.tokens) - 1), self.now)
            self.scheduler.ended(key, self.now)
            self.ended[key] = self.now

    def cancel(self, key: int) -> None:
        for where in (self.prompts, self.decoding):
            where.discard(key)
        self.scheduler.cancel(key, self.now)
        del self.texts[key]

    def run(self) -> None:
        """Until all are answered."""
        while len(self.ended) < len(self.texts):
            assert self.step(), "nothing runs, nothing loads, and somebody waits"
        assert all(text.answered == text.length for text in self.texts.values())


@pytest.mark.parametrize("waits", ["multi_queue", "fifo", "sjf"])
@pytest.mark.parametrize("token_s", [1e-4, 1e-2])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_comes_everybody_is_answered_as_if_alone(seed: int, waits: Waits, token_s: float) -> None:
    """Predictions are wrong, memory is short, adapters come and go, and what `_compute` reads is the request's own."""
    rng = random.Random(seed)
    pages, size = rng.choice((14, 20, 40)), rng.choice((1, 2, 4))
    keep, order, rows = rng.random() < 0.7, rng.choice((*Order.__args__,)), rng.choice((1, 3, 16))  # type: ignore[attr-defined]
    engine = Engine(pages, size, keep, order, rows, waits, rng.choice((1, 8, 64)), token_s)
    for _ in range(STEPS):
        adapter = rng.choice((None, "a", "b", "c"))
        bytes = 0 if adapter is None else 1 + ord(adapter) - ord("a")
        longest = (pages - bytes) * size - 20
        if longest < 2:
            continue
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, min(40, longest)))]
        engine.add(prompt, rng.randrange(1, 20), rng.randrange(1, 20), adapter, bytes)
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.05:
            alive = [key for key in engine.texts if key not in engine.ended]
            if alive:
                engine.cancel(alive[0])
    engine.run()
    memory = engine.scheduler.memory
    assert memory.pages.used == 0
    assert not engine.scheduler.admission.waiting()


def test_short_prompts_join_the_pass_of_a_long_one() -> None:
    engine = Engine(2000, budget=100)
    live = engine.add([1], 200, most=200)
    engine.step()
    long = engine.add(list(range(5000)), 2)
    engine.step()
    short = engine.add(list(range(7000, 7050)), 2)
    engine.step()
    assert engine.plans[1].chunks == [(long, 100)]
    assert engine.plans[2].chunks == [(short, 50), (long, 50)]
    assert {live, short} <= engine.decoding


def test_long_prompts_go_on_though_short_ones_keep_coming() -> None:
    engine = Engine(4000, 16, budget=500)
    long = engine.add(list(range(2000)), 2)
    passed = 0
    for number in range(1000):
        if long in engine.ended:
            break
        engine.add([number] * 650, 1)
        engine.step()
        passed += long not in dict(engine.plans[-1].chunks)
    assert long in engine.ended
    assert passed > 10


@pytest.mark.parametrize("waits", ["multi_queue", "fifo", "sjf"])
def test_the_oldest_that_runs_never_makes_way_and_never_sits_out(waits: Waits) -> None:
    engine = Engine(12, 4, waits=waits)
    keys = [engine.add([number] * 7, 19, predicted=1) for number in range(3)]
    engine.run()
    assert any(plan.put_back for plan in engine.plans)
    assert keys[0] not in {key for plan in engine.plans for key in (*plan.put_back, *plan.sit_out)}


def test_predictions_that_hold_need_nobody_to_make_way() -> None:
    engine = Engine(12, 4)
    for number in range(6):
        engine.add([number] * 7, 17)
    engine.run()
    assert not any(plan.put_back or plan.sit_out for plan in engine.plans)


def crowded(token_s: float) -> tuple[Engine, int, int]:
    """24 pages: an answer with all that it will have, one that outgrows what it was predicted, and a short one behind
    it that has the rest."""
    engine = Engine(24, 4, token_s=token_s, budget=100)
    oldest = engine.add([9] * 8, 20)
    outgrows = engine.add(list(range(39)), 20, predicted=1)
    engine.add(list(range(50, 68)), 6)
    return engine, oldest, outgrows


@pytest.mark.parametrize(("token_s", "keeps"), [(1e-6, False), (1.0, True)])
def test_where_another_is_about_to_end_nobody_makes_way_that_takes_long_to_compute_again(
    token_s: float, keeps: bool
) -> None:
    engine, _, outgrows = crowded(token_s)
    engine.run()
    waited = {key for plan in engine.plans for key in plan.sit_out}
    assert any(plan.put_back for plan in engine.plans) == (not keeps)
    assert waited == ({outgrows} if keeps else set())


def test_nobody_is_let_in_while_one_sits_out() -> None:
    engine, _, _ = crowded(1.0)
    for number in range(40):
        engine.add([100 + number], 1)
        engine.step()
    engine.run()
    assert any(plan.sit_out for plan in engine.plans)
    assert not any(plan.sit_out and plan.admit for plan in engine.plans)


def test_parallel_requests_compute_a_common_prompt_once() -> None:
    engine = Engine(400)
    common = list(range(400))
    for number in range(8):
        engine.add([*common, 1000 + number, 1], 3)
    engine.run()
    assert sum(tokens for plan in engine.plans for _, tokens in plan.chunks) < 400 + 8 * 12
    assert engine.scheduler.hit == 7 * 400


def test_one_that_does_not_share_computes_all() -> None:
    engine = Engine(400)
    for _ in range(2):
        key = engine.add(list(range(40)), 3)
        engine.run()
    text = Text(Root(None), list(range(40)), 3)
    prompt = Prompt(key + 1, text, text.root, 40, 3, 60, 1.0, shares=False)
    assert engine.scheduler.job(prompt).prompt == 40
    assert engine.scheduler.job(prompt._replace(shares=True)).prompt == 4


def test_what_is_said_to_be_there_is_checked() -> None:
    engine = Engine(10)
    with pytest.raises(ValueError, match="needs 10 bytes, and 3 for its adapter, but only 10 of 10 bytes"):
        engine.add(list(range(20)), 20, adapter="a", bytes=3)
    engine._keys = count(engine.add([1], 1))
    with pytest.raises(ValueError, match="waits or runs already"):
        engine.add([1], 1)
