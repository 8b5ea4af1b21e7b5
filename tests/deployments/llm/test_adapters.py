"""Many adapters in little memory, on an executor whose tokens betray a wrong one, and all that may go wrong."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_executor import (
    EOS,
    SLOT_BYTES,
    ScriptedAdapters,
    ScriptedExecutor,
    adapter,
    byte_tokenizer,
    expected,
)
from support.waiting import HANGS_AFTER_S

from pliant.deployments.llm.adapter_loader import AdapterLoader, AdapterLoadError, Loaded
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.deployments.serving.tenants import Tenant
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.llm.adapter_cache import AdapterCache, Eviction
from pliant.policies.llm.arrival_histogram import ArrivalHistogram
from pliant.policies.llm.decode_admission import LateError
from pliant.policies.llm.jobs import Decisions, SchedulerError
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues, ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.sampling import Sampling

TOKENIZER = byte_tokenizer()
MAX_LENGTH = 48
ORDERS = ("fifo", "sjf", "multi_queue")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Predictor:
    """Says what it was told to say, by name of the adapter; else the maximum."""

    accuracy = error = 0.0

    def __init__(self, **lengths: int) -> None:
        self.lengths = lengths
        self.observed: list[tuple[str | None, int, int]] = []

    def predict(self, adapter: str | None, prompt: int, most: int) -> int:
        return min(self.lengths.get(adapter or "base", most), most)

    def observe(self, adapter: str | None, prompt: int, tokens: int, predicted: int) -> None:
        self.observed.append((adapter, prompt, tokens))


class SteppedLoader(AdapterLoader):
    """Without a thread: a load is over when it has been looked for `steps` times."""

    def __init__(self, source: ScriptedAdapters, steps: int = 2) -> None:
        super().__init__(source)
        self._steps = steps
        self._under_way: list[tuple[int, AdapterRef]] = []
        self._time = 0
        self.waits = 0

    def begin(self, ref: AdapterRef) -> None:
        self._under_way.append((self._time + self._steps, ref))

    def finished(self) -> list[Loaded]:
        self._time += 1
        over = [ref for due, ref in self._under_way if due <= self._time]
        self._under_way = [one for one in self._under_way if one[0] > self._time]
        return [self.load(ref) for ref in over]

    def wait(self, timeout_s: float) -> None:
        assert timeout_s <= 0.05
        self.waits += 1


class Restless(Scheduler[Answer, AdapterRef]):
    """Puts back whom it likes, every now and then."""

    dice = random.Random(0)
    squash = 0.0
    """How likely in each step."""

    def schedule(
        self, now: float, slots: int, prompts: int, first: Collection[Answer] = ()
    ) -> Decisions[Answer, AdapterRef]:
        decisions = super().schedule(now, slots, prompts, first)
        admitted = {job.key for job in decisions.admit}
        running = [one for key, one in self._state.running.items() if key not in admitted]
        if running and self.dice.random() < self.squash:
            for one in self.dice.sample(running, self.dice.randint(1, len(running))):
                self._state.squash(one, now)
                decisions.squash.append(one.job.key)
            self._changed = True
        return decisions


class Served:
    """An engine, and all there is about it."""

    def __init__(
        self,
        executor: ScriptedExecutor,
        order: str = "multi_queue",
        eviction: Eviction = "joint",
        prefetch: bool = True,
        predicted: bool = False,
        predictor: Predictor | None = None,
        load_steps: int = 2,
        **options: Any,
    ) -> None:
        self.executor = executor
        self.source = ScriptedAdapters()
        self.loader = SteppedLoader(self.source, load_steps)
        self.predictor = predictor or Predictor()
        self.clock = Clock()
        self.cache: AdapterCache[AdapterRef] = AdapterCache(eviction, window_s=0.5)
        orders: dict[str, Queues[Answer, AdapterRef]] = {
            "fifo": Fifo(),
            "sjf": ShortestFirst(),
            "multi_queue": MultiQueue(QueueClasses(1.0, 0.1), patience_s=0.01),
        }
        histogram = ArrivalHistogram[AdapterRef]() if predicted else None
        scheduler = Restless(orders[order], self.cache, executor.arena_bytes, prefetch, histogram, slots=executor.slots)
        self.scheduler = scheduler
        self.engine = Engine(
            *(executor, TOKENIZER, (EOS,), options.pop("queue", 100), options.pop("stall_s", 0.05), self.clock),
            debug=True,
            scheduler=scheduler,
            predictor=self.predictor,
            loader=self.loader,
            **options,
        )
        self.pieces: dict[str, list[Piece]] = {}
        self.errors: dict[str, Exception] = {}

    def add(self, *generations: Generation) -> None:
        for wanted in generations:
            self.engine.add(wanted)
            self.pieces[wanted.id] = []

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.clock.now += 0.001
            for id, item in self.engine.step():
                assert id not in self.errors
                assert not (self.pieces[id] and self.pieces[id][-1].finish)
                if isinstance(item, Piece):
                    self.pieces[id].append(item)
                else:
                    self.errors[id] = item
            if self.engine.failure:
                raise self.engine.failure

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError(f"still busy after {most} steps: {self.engine.report()}")

    def tokens(self, id: str) -> list[int]:
        return [token for piece in self.pieces[id] for token in piece.tokens]

    def check_released(self, pinned: str | None = None) -> None:
        """Nobody is there, and nothing is held for anyone; all adapters could be evicted, but for the pinned one."""
        report = self.engine.report()
        assert (report["live"], report["waiting"], report["live_tokens"]) == (0, 0, 0)
        assert self.scheduler.used == self.cache.bytes
        idle = {key: blob.nbytes for key, blob in self.executor.installed.items() if key.split("@")[0] != pinned}
        assert self.cache.idle == sum(idle.values())
        self.engine.check()


def generation(
    id: str = "a", adapter: AdapterRef | None = None, prompt: int = 5, max_tokens: int = 10, **options: Any
) -> Generation:
    seed = options.pop("seed", sum(id.encode()))
    options.setdefault("ignore_eos", True)
    tokens = tuple((seed + index) % 100 for index in range(prompt))
    return Generation(id, tokens, max_tokens, Sampling(seed=seed), adapter=adapter, **options)


def right(served: Served, wanted: Generation) -> bool:
    pieces = served.pieces[wanted.id]
    return bool(pieces and pieces[-1].finish) and served.tokens(wanted.id) == expected(wanted, MAX_LENGTH)


SLOTS = 4
MEMORY = 6 * SLOT_BYTES
NAMES = "pqrstuvw"


class Arrival(NamedTuple):
    pause: int
    """Steps before it comes."""
    generation: Generation
    cancel_after: int | None
    """Steps until it is cancelled."""


def arrivals(dice: random.Random, refs: list[AdapterRef | None], cancels: float) -> list[Arrival]:
    return [
        Arrival(
            dice.choice((0, 0, 0, 1, 3, 8)),
            generation(
                str(index),
                dice.choice(refs),
                prompt=dice.randint(1, 28),
                max_tokens=dice.randint(1, 18),
                seed=dice.randint(0, 50),
                ignore_eos=dice.random() < 0.5,
                tenant=Tenant(dice.choice("abc"), dice.choice((1.0, 3.0))),
            ),
            dice.randint(0, 25) if dice.random() < cancels else None,
        )
        for index in range(dice.randint(1, 30))
    ]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    pipelined=st.booleans(),
    compact=st.booleans(),
    order=st.sampled_from(ORDERS),
    eviction=st.sampled_from(("joint", "compound", "fair_share", "lru", "lfu", "none")),
    prefetch=st.sampled_from(("none", "queued", "predicted")),
    pinned=st.booleans(),
    broken=st.booleans(),
    load_steps=st.integers(1, 6),
    stall_s=st.sampled_from((0.001, 0.05, 10.0)),
    squash=st.sampled_from((0.0, 0.05)),
    cancels=st.sampled_from((0.0, 0.3)),
)
def test_every_answer_is_that_of_its_adapter_whatever_else_there_is(
    seed: int,
    pipelined: bool,
    compact: bool,
    order: str,
    eviction: Eviction,
    prefetch: str,
    pinned: bool,
    broken: bool,
    load_steps: int,
    stall_s: float,
    squash: float,
    cancels: float,
) -> None:
    """Requests come, are cancelled and put back, loads fail, predictions are wrong; each is answered, once and exactly.

    The engine checks itself in every step, and the executor that nothing is used that is not there.
    """
    dice = random.Random(seed)
    served = Served(
        ScriptedExecutor(SLOTS, MAX_LENGTH, pipelined, arena_bytes=MEMORY, page=dice.choice((4, MAX_LENGTH))),
        *(order, eviction, prefetch != "none", prefetch == "predicted"),
        Predictor(**{name: dice.randint(1, 20) for name in (*NAMES, "base") if dice.random() < 0.5}),
        load_steps,
        compact=compact,
        stall_s=stall_s,
    )
    served.scheduler.dice, served.scheduler.squash = dice, squash
    largest = MEMORY - SLOT_BYTES - (SLOT_BYTES if pinned else 0)
    refs: list[AdapterRef | None] = [adapter(name, dice.randint(1, largest // dice.randint(1, 4))) for name in NAMES]
    refs += [None, None]
    if pinned:
        refs.append(adapter("pinned", SLOT_BYTES))
        served.engine.pin(adapter("pinned", SLOT_BYTES))
    if broken:
        refs.append(adapter("broken", 40, folder="broken"))
    coming = arrivals(dice, refs, cancels)
    cancelled: dict[str, list[int]] = {}
    due: dict[int, list[str]] = {}
    step = 0

    def go_on() -> None:
        nonlocal step
        for id in due.pop(step, []):
            served.engine.cancel(id)
            cancelled[id] = served.tokens(id)
        served.step()
        step += 1

    for pause, wanted, cancel_after in coming:
        for _ in range(pause):
            go_on()
        served.add(wanted)
        if cancel_after is not None:
            due.setdefault(step + cancel_after, []).append(wanted.id)
    while served.engine.busy:
        go_on()
        assert step < 5000, served.engine.report()

    for _, wanted, _ in coming:
        whole, got = expected(wanted, MAX_LENGTH), served.tokens(wanted.id)
        assert got == cancelled.get(wanted.id, got)
        if wanted.id in served.errors:
            assert wanted.adapter
            assert wanted.adapter.name == "broken"
            assert isinstance(served.errors[wanted.id], AdapterLoadError)
            assert got == []
        elif wanted.id in cancelled and got != whole:
            assert got == whole[: len(got)]
        else:
            assert right(served, wanted)
    served.check_released("pinned" if pinned else None)


def squashing(pipelined: bool, tokens: int) -> tuple[Served, list[Generation]]:
    """A short answer, as predicted, passes one that waits for memory; after `tokens` it has outlived the prediction."""
    executor = ScriptedExecutor(SLOTS, MAX_LENGTH, pipelined, arena_bytes=5 * SLOT_BYTES)
    predictor = Predictor()
    served = Served(executor, predictor=predictor)
    running = [generation(f"running {index}", max_tokens=15) for index in range(2)]
    served.add(*running)
    served.step(2)
    blocked = generation("blocked", adapter("p", 4 * SLOT_BYTES), max_tokens=15)
    served.add(blocked)
    predictor.lengths["q"] = tokens
    passing = generation("passing", adapter("q", SLOT_BYTES + 4), max_tokens=40, prompt=6)
    served.add(passing)
    return served, [*running, blocked, passing]


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_request_that_is_put_back_goes_on_where_it_was(pipelined: bool) -> None:
    served, wanted = squashing(pipelined, tokens=5)
    served.run()
    assert served.engine.report()["squashed"] == 1
    assert served.engine.report()["bypassed"] >= 1
    assert served.engine.report()["adapters"]["evictions"] == {"memory": 2}  # its own went with it, and came again
    for each in wanted:
        assert right(served, each), each.id
    prefills = [prefill for step in served.executor.steps for prefill in step.prefills]
    again = next(prefill for prefill in prefills if len(prefill.ids) > 6)  # the others' prompts have 5
    assert again.ids.tolist()[:6] == list(wanted[-1].prompt)
    assert again.ids.tolist()[6:] == expected(wanted[-1], MAX_LENGTH)[: len(again.ids) - 6]
    served.check_released()


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_request_that_was_put_back_can_be_cancelled(pipelined: bool) -> None:
    served, wanted = squashing(pipelined, tokens=5)
    while not served.engine.report()["squashed"]:
        served.step()
    served.engine.cancel("passing")
    count = len(served.tokens("passing"))
    served.run()
    assert len(served.tokens("passing")) == count
    assert all(right(served, each) for each in wanted[:-1])
    served.check_released()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_cancelling_releases_everything(pipelined: bool, steps: int) -> None:
    """While it waits, while its adapter is loaded, in the midst of its prompt and of its answer."""
    executor = ScriptedExecutor(2, MAX_LENGTH, pipelined, arena_bytes=3 * SLOT_BYTES)
    served = Served(executor, stall_s=0.001)
    served.add(generation("other", max_tokens=30))
    served.add(generation("a", adapter("p", 60), prompt=40))
    served.step(steps)
    served.engine.cancel("a")
    wanted = generation("b", adapter("q", 2 * SLOT_BYTES))
    served.add(wanted)
    served.run()
    assert right(served, wanted)
    served.check_released()


@pytest.mark.parametrize("order", ORDERS)
def test_a_load_that_fails_ends_those_that_wait_for_it_and_is_tried_again(order: str) -> None:
    served = Served(ScriptedExecutor(SLOTS, MAX_LENGTH, arena_bytes=MEMORY), order)
    served.source.broken.add("p")
    served.add(*(generation(id, adapter("p")) for id in "ab"), generation("c"), generation("d", adapter("q")))
    served.run()
    assert set(served.errors) == {"a", "b"}
    assert str(served.errors["a"]) == "adapter p cannot be loaded: its weights are missing"
    assert isinstance(served.errors["a"], AdapterLoadError)
    assert right(served, generation("c"))
    assert right(served, generation("d", adapter("q")))
    report = served.engine.report()["adapters"]
    assert (report["failed_loads"], report["loads"], report["resident"]) == (1, 1, ["q"])
    served.source.broken.clear()
    served.add(again := generation("again", adapter("p")))
    served.run()
    assert right(served, again)
    served.check_released()


def test_adapters_stay_until_their_memory_is_needed() -> None:
    executor = ScriptedExecutor(SLOTS, MAX_LENGTH)  # four slots, and nothing beside them
    served = Served(executor)
    for name in "pq":
        served.add(generation(name, adapter(name, SLOT_BYTES)))
        served.run()
    assert served.engine.report()["adapters"]["resident"] == ["p", "q"]
    assert executor.limit == 2
    served.add(generation("again", adapter("p", SLOT_BYTES)))
    served.run()
    report = served.engine.report()["adapters"]
    assert (report["hits"], report["misses"], report["loads"], report["bytes"]) == (1, 2, 2, 2 * SLOT_BYTES)
    served.add(*(generation(id, max_tokens=20) for id in "1234"))
    served.step(3)
    assert (executor.limit, served.engine.report()["live"]) == (4, 4)
    served.run()
    assert served.engine.report()["adapters"]["evictions"] == {"memory": 2}
    served.check_released()


def test_without_a_cache_they_leave_at_once() -> None:
    served = Served(ScriptedExecutor(SLOTS, MAX_LENGTH), eviction="none")
    served.add(generation("a", adapter("p")), generation("b", max_tokens=20))
    served.run()
    report = served.engine.report()["adapters"]
    assert (report["resident"], report["evictions"]) == ([], {"unused": 1})


def test_pages_that_adapters_take_are_emptied_before() -> None:
    """The last page holds a request when an adapter needs its memory; the first is free by then."""
    executor = ScriptedExecutor(SLOTS, MAX_LENGTH)
    served = Served(executor)
    for id, tokens in (("a", 2), ("b", 2), ("c", 2), ("d", 30)):
        served.add(generation(id, max_tokens=tokens))
    served.add(wanted := generation("e", adapter("p", 3 * SLOT_BYTES - 8), max_tokens=3))
    served.run()
    assert executor.page_moves == [(4, 1)]
    assert right(served, wanted)
    assert right(served, generation("d", max_tokens=30))


def test_pinned_adapters_are_there_at_the_start_and_stay() -> None:
    executor = ScriptedExecutor(SLOTS, MAX_LENGTH)
    served = Served(executor)
    with pytest.raises(AdapterLoadError, match="adapter x cannot be loaded: its weights are missing"):
        served.engine.pin(adapter("x", 8, folder="broken"))
    served.engine.check()
    pinned = adapter("p", SLOT_BYTES)
    served.engine.pin(pinned)
    assert served.source.staged[1:] == [pinned]
    assert executor.limit == 3
    served.add(*(generation(str(index), adapter("q", 2 * SLOT_BYTES) if index % 2 else None) for index in range(12)))
    served.add(generation("last", pinned))
    served.run()
    report = served.engine.report()["adapters"]
    assert "p" in report["resident"]
    assert served.source.staged.count(pinned) == 1
    with pytest.raises(AdapterLoadError, match=r"adapter r takes 0\.0 MiB, but one text and the pinned adapters leave"):
        served.engine.add(generation("too large", adapter("r", 2 * SLOT_BYTES + 1)))
    served.engine.check()


def test_what_never_fits_is_refused_with_numbers() -> None:
    served = Served(ScriptedExecutor(SLOTS, MAX_LENGTH, arena_bytes=8 * 2**20))
    large = adapter("p", 8 * 2**20)
    with pytest.raises(
        AdapterLoadError, match=r"adapter p takes 8\.0 MiB, but one text .* leave 8\.0 MiB: raise memory_mb"
    ):
        served.engine.add(generation("a", large))
    without = Engine(ScriptedExecutor(), TOKENIZER, (EOS,), 10, 0.05)
    with pytest.raises(AdapterLoadError, match="adapter p cannot be loaded: this service has no `adapters`"):
        without.add(generation("a", large))
    assert not served.engine.busy
    assert not without.busy


def test_an_idle_step_waits_for_the_loader() -> None:
    served = Served(ScriptedExecutor(), load_steps=5)
    served.add(generation("a", adapter("p"), max_tokens=3))
    served.run()
    assert served.loader.waits == 5  # in each step of the load, and in no other
    served.add(generation("b", adapter("q"), max_tokens=3), generation("c", max_tokens=30))
    served.run()
    assert served.loader.waits == 5


def test_who_waits_for_an_adapter_in_vain_is_told_in_time() -> None:
    served = Served(ScriptedExecutor(), load_steps=10**6)
    served.add(generation("a", adapter("p"), first_token_within_s=0.01))
    served.step(20)
    assert isinstance(served.errors["a"], LateError)
    assert served.engine.report()["waiting"] == 0
    served.engine.check()


def test_a_load_that_takes_too_long_is_no_surprise() -> None:
    source = ScriptedAdapters()
    served = Served(ScriptedExecutor(), load_steps=1)
    served.loader.load = lambda ref: Loaded(ref, 0.5, source.stage(ref))  # type: ignore[method-assign]
    served.add(generation("a", adapter("p", 32)))
    served.run()
    with pytest.raises(LateError, match=r"would come after 0\.5\d\d s, and is wanted within 0\.100 s"):
        served.engine.add(generation("b", adapter("q", 32), first_token_within_s=0.1))
    served.add(generation("c", adapter("p", 32), first_token_within_s=0.1))
    served.run()
    assert not served.errors


def test_predictions_are_learned_from_answers_but_not_from_rehearsals() -> None:
    served = Served(ScriptedExecutor())
    served.engine.rehearse()
    assert served.predictor.observed == []
    assert served.scheduler.stats().classes[0].admitted == 0
    served.add(generation("a", adapter("p"), prompt=7, max_tokens=3), generation("b", max_tokens=4))
    served.step(3)
    served.engine.cancel("b")
    served.run()
    assert served.predictor.observed == [("p", 7, 3)]


def test_check_finds_an_adapter_that_is_not_where_it_should_be() -> None:
    served = Served(ScriptedExecutor())
    served.add(generation("a", adapter("p"), max_tokens=30))
    served.step(6)
    served.engine.check()
    served.cache.bytes += 1
    with pytest.raises((SchedulerError, Exception), match="bytes"):
        served.engine.check()


class Gate(ScriptedAdapters):
    """Loads nothing before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def stage(self, ref: AdapterRef) -> torch.Tensor:
        assert self.opened.wait(HANGS_AFTER_S)
        return super().stage(ref)


def test_the_loader_loads_in_order_and_hands_over_once() -> None:
    source = Gate()
    loader = AdapterLoader(source, most=3)
    refs = [adapter("p"), adapter("q", folder="broken"), adapter("r")]
    for ref in refs:
        loader.begin(ref)
    with pytest.raises(RuntimeError, match="s cannot be loaded: 3 loads are under way, of at most 3"):
        loader.begin(adapter("s"))
    assert loader.finished() == []
    source.opened.set()
    finished: list[Loaded] = []
    until = time.monotonic() + HANGS_AFTER_S
    while len(finished) < 3 and time.monotonic() < until:
        loader.wait(HANGS_AFTER_S)
        finished += loader.finished()
    assert [loaded.ref for loaded in finished] == refs
    assert [isinstance(loaded.blob, torch.Tensor) for loaded in finished] == [True, False, True]
    assert loader.pending == 0
    loader.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        loader.begin(adapter("s"))


def test_a_load_without_end_is_given_up_with_those_behind_it_until_it_ends() -> None:
    source = Gate()
    loader = AdapterLoader(source)
    loader.limit_s = 0.01
    assert loader.loading_s() == 0
    loader.begin(adapter("p", folder="slow"))
    loader.begin(adapter("q"))
    finished: list[Loaded] = []
    until = time.monotonic() + HANGS_AFTER_S
    while len(finished) < 2 and time.monotonic() < until:
        finished += loader.finished()
    loader.begin(adapter("r"))
    finished += loader.finished()
    assert [loaded.ref.name for loaded in finished] == ["p", "q", "r"]
    for loaded in finished:
        assert isinstance(loaded.blob, AdapterLoadError)
        assert f"adapter {loaded.ref.name} cannot be loaded: p has been read for" in str(loaded.blob)
    assert loader.loading_s() > 0.01
    assert loader.pending == 0
    source.opened.set()
    loader.limit_s = HANGS_AFTER_S
    loader.begin(adapter("s"))
    loader.wait(HANGS_AFTER_S)
    assert [(loaded.ref.name, isinstance(loaded.blob, torch.Tensor)) for loaded in loader.finished()] == [("s", True)]
    loader.close()


def test_requests_do_not_wait_for_a_load_without_end() -> None:
    source = Gate()
    executor = ScriptedExecutor(SLOTS, MAX_LENGTH, arena_bytes=MEMORY)
    engine = Engine(
        *(executor, TOKENIZER, (EOS,), 100, 0.05),
        debug=True,
        scheduler=Scheduler(Fifo(), AdapterCache(), executor.arena_bytes),
        loader=AdapterLoader(source),
    )
    engine.limit_loads(0.01)
    engine.add(generation("a", adapter("p")))
    items: list[tuple[str, Piece | Exception]] = []
    until = time.monotonic() + HANGS_AFTER_S
    while engine.busy and time.monotonic() < until:
        items += engine.step()
    assert [(id, type(item)) for id, item in items] == [("a", AdapterLoadError)]
    assert engine.loading_s() > 0.01
    source.opened.set()
    engine.close()


def test_when_the_last_request_ends_adapters_go_that_nobody_wants() -> None:
    for pipelined in (False, True):
        served = Served(ScriptedExecutor(SLOTS, MAX_LENGTH, pipelined, arena_bytes=MEMORY), eviction="none")
        served.add(generation("a", adapter("p")))
        served.run()
        assert served.executor.installed == {}
        served.add(generation("b", adapter("p")))
        served.step(5)
        assert served.executor.installed
        served.engine.cancel("b")
        served.run()
        assert served.executor.installed == {}
        assert served.engine.report()["adapters"]["evictions"] == {"unused": 2}


def test_loads_end_though_nobody_waits_for_them_any_more() -> None:
    served = Served(ScriptedExecutor(SLOTS, MAX_LENGTH, arena_bytes=MEMORY))
    served.add(generation("a", adapter("p")))
    served.step()
    served.engine.cancel("a")
    served.run()
    assert served.engine.report()["adapters"]["resident"] == ["p"]
    served.check_released()


def test_likely_adapters_are_loaded_though_nobody_is_there() -> None:
    """p comes every other second, and goes for one that takes all the memory; it is back before it comes again."""
    served = Served(ScriptedExecutor(SLOTS, MAX_LENGTH, arena_bytes=MEMORY), predicted=True)
    assert served.engine.looks_every_s == 1.0
    large = adapter("large", MEMORY - SLOT_BYTES)
    for round in range(10):
        served.clock.now += 2.0
        served.add(generation(f"p{round}", adapter("p", SLOT_BYTES + 4), max_tokens=2))
        served.run()
    served.add(generation("large", large, max_tokens=2))
    served.run()
    assert served.engine.report()["adapters"]["resident"] == ["large"]
    served.clock.now += 1.0
    served.step()
    served.run()
    assert served.engine.report()["adapters"]["resident"] == ["p"]
    served.check_released()


def test_a_defect_in_a_load_is_an_error_of_that_load() -> None:
    class Defect(ScriptedAdapters):
        def stage(self, ref: AdapterRef) -> torch.Tensor:
            raise MemoryError("no room")

    blob = AdapterLoader(Defect()).load(adapter("p")).blob
    assert isinstance(blob, AdapterLoadError)
    assert str(blob) == "adapter p cannot be loaded: MemoryError: no room"


def test_an_engine_with_a_thread_that_loads() -> None:
    executor = ScriptedExecutor(SLOTS, MAX_LENGTH, arena_bytes=MEMORY)
    cache: AdapterCache[AdapterRef] = AdapterCache()
    queues: MultiQueue[Answer, AdapterRef] = MultiQueue(QueueClasses(1.0))
    engine = Engine(
        *(executor, TOKENIZER, (EOS,), 100, 0.05),
        debug=True,
        scheduler=Scheduler(queues, cache, executor.arena_bytes, slots=executor.slots),
        loader=AdapterLoader(ScriptedAdapters()),
    )
    wanted = [generation(str(index), adapter(NAMES[index % 8], 100), max_tokens=4) for index in range(40)]
    for each in wanted:
        engine.add(each)
    pieces: dict[str, list[Piece]] = {each.id: [] for each in wanted}
    until = time.monotonic() + HANGS_AFTER_S
    while engine.busy and time.monotonic() < until:
        for id, item in engine.step():
            assert isinstance(item, Piece), item
            pieces[id].append(item)
    engine.close()
    assert all(list(merged(pieces[each.id]).tokens) == expected(each, MAX_LENGTH) for each in wanted)
