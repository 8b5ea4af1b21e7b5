"""Batches in a replica: what is computed together, whose turn it is, and that nobody gets another's answer."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_classifiers
from support.caches import with_libraries
from support.doubles import Sleepers
from support.waiting import HANGS_AFTER_S, until

from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Query
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.tenants import Tenant
from pliant.formats.pass_times import PassTimes
from pliant.kernels import c_compiler
from pliant.kernels.encoder import timed_runtime
from pliant.kernels.encoder.texts import Output, Text

BLOCKS, POISON = 99, 66
"""First tokens of a text that is computed until the test goes on, and of one that cannot be computed."""
OVERHEAD_S, PER_TOKEN_S = 0.010, 0.0001


def pass_s(count: int, length: int) -> float:
    return OVERHEAD_S + PER_TOKEN_S * count * length


COUNTS, LENGTHS = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64)
TIMES = PassTimes(
    counts=COUNTS,
    lengths=LENGTHS,
    seconds=tuple(tuple(pass_s(count, length) for length in LENGTHS) for count in COUNTS),
)


class Packer:
    """Answers each text with its first token, and says which it was given together."""

    max_length = 64
    dynamic = True
    backend = "packer"
    times = TIMES

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.go_on, self.blocked = threading.Event(), threading.Event()

    def __call__(self, ids: np.ndarray | Sequence[int], types: Any = None) -> np.ndarray:
        return self.run_all([Text(ids, types)])[0].logits

    def run_all(self, texts: Sequence[Text], *, importance: bool = False) -> list[Output]:
        firsts = [int(text.ids[0]) for text in texts]
        if POISON in firsts:
            raise ValueError("cannot be computed")
        self.passes.append(firsts)
        if BLOCKS in firsts:
            self.blocked.set()
            self.go_on.wait(HANGS_AFTER_S)
        received = np.arange(len(texts[0].ids), dtype=np.float32) if importance else None
        return [Output(np.array([first, -first], np.float32), received) for first in firsts]


class Packers(Sleepers):
    resident = True

    def __init__(self) -> None:
        super().__init__((16, 64))
        self.packer = Packer()

    def load(self, max_length: int) -> Runtime:
        return self.packer


def query(first: int, length: int = 8, budget_s: float | None = 10.0, tenant: str = "a", **more: Any) -> Query:
    ids = np.array([first] * length, dtype="<i4").tobytes()
    return Query(ids, length, budget_s, 1.0, tenant=Tenant(tenant), **more)


class House:
    """An engine that computes one text until `answers` is called, while others arrive."""

    def __init__(self) -> None:
        self.packer = Packers()
        self.engine = Engine(self.packer, limit=100)
        self.asked: list[asyncio.Task[Answer | Refusal]] = []

    async def begin(self) -> None:
        await self.engine.hold(64)
        await self.ask(query(BLOCKS))
        await until(self.packer.packer.blocked.is_set)
        self.packer.packer.passes.clear()

    async def ask(self, *queries: Query) -> None:
        self.asked += [asyncio.create_task(self.engine.infer(each)) for each in queries]
        await asyncio.sleep(0)

    async def answers(self) -> list[Answer | Refusal | BaseException]:
        self.packer.packer.go_on.set()
        return (await asyncio.gather(*self.asked, return_exceptions=True))[1:]

    @property
    def passes(self) -> list[list[int]]:
        return self.packer.packer.passes


@pytest.fixture
async def house() -> House:
    made = House()
    await made.begin()
    return made


def firsts(answers: Sequence[object]) -> list[float]:
    assert all(isinstance(answer, Answer) for answer in answers), answers
    return [float(np.frombuffer(answer.logits, "<f4")[0]) for answer in answers]  # type: ignore[attr-defined]


async def test_a_text_that_finds_nobody_is_computed_at_once_and_alone() -> None:
    engine = Engine(packers := Packers())
    await engine.hold(64)
    for first in range(3):
        assert firsts([await engine.infer(query(first))]) == [first]
    assert packers.packer.passes == [[0], [1], [2]]


async def test_those_that_wait_are_computed_together_and_each_gets_its_own_answer(house: House) -> None:
    await house.ask(*(query(first) for first in range(8)))
    assert firsts(await house.answers()) == list(range(8))
    assert len(house.passes) <= 2
    assert sorted(itertools.chain(*house.passes)) == list(range(8))
    report = house.engine.report()
    assert (report["passes"], report["served"], report["waiting"]) == (1 + len(house.passes), 9, 0)


async def test_a_text_that_cannot_be_computed_fails_no_other(house: House) -> None:
    await house.ask(query(1), query(POISON), query(2))
    one, poison, two = await house.answers()
    assert firsts([one, two]) == [1, 2]
    assert isinstance(poison, ValueError)


async def test_whoever_goes_away_is_not_computed(house: House) -> None:
    await house.ask(query(1), query(2), query(3))
    house.asked[2].cancel()
    await asyncio.sleep(0)
    one, two, three = await house.answers()
    assert isinstance(two, asyncio.CancelledError)
    assert firsts([one, three]) == [1, 3]
    assert house.passes == [[1, 3]]


async def test_a_batch_is_charged_to_those_who_are_in_it_and_begins_with_whose_turn_it_is(house: House) -> None:
    await house.ask(*(query(first, tenant="greedy") for first in range(60)), query(77, length=64, tenant="modest"))
    await house.answers()
    assert 77 in house.passes[0], "the one who has had nothing"
    assert len(house.passes[0]) > 8, "others fill the batch"


async def test_what_waits_behind_a_batch_waits_for_less_than_one_by_one(house: House) -> None:
    """Sixteen more would take 0.17 s alone, and 0.02 s together."""
    await house.ask(*(query(first, budget_s=None) for first in range(16)))
    await house.ask(query(17, budget_s=0.1))
    assert isinstance((await house.answers())[-1], Answer)


async def test_importance_is_told_of_those_of_a_batch_that_ask_for_it(house: House) -> None:
    wants = ImportanceRequest(1.0, 2.0)
    await house.ask(query(1), query(2, importance_request=wants), query(3, importance_request=wants))
    plain, told, also = await house.answers()
    assert house.passes == [[1, 2, 3], [2, 3]]
    assert isinstance(plain, Answer)
    assert isinstance(told, Answer)
    assert isinstance(also, Answer)
    assert plain.importance == b""
    assert np.frombuffer(told.importance, "<f4").tolist() == list(range(8))
    assert told.importance_s > 0 == plain.importance_s


async def test_to_be_at_home_elsewhere_interrupts_nothing(house: House) -> None:
    before = house.engine.report()
    report = await house.engine.hold(16)
    assert (before["home"], report["home"], report["max_length"]) == (64, 16, 64)
    assert report["version"] > before["version"]
    assert house.engine.held is house.packer.packer
    await house.ask(query(1, length=64))
    assert firsts(await house.answers()) == [1]


async def test_the_machine_may_be_slower_than_it_was_measured(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    for module in ("engine", "computing"):
        for name in ("monotonic", "perf_counter"):
            monkeypatch.setattr(f"pliant.deployments.encoder.{module}.time.{name}", clock)
    run_all = house.packer.packer.run_all

    def slow(texts: Sequence[Text], *, importance: bool = False) -> list[Output]:
        clock.now += 3 * pass_s(len(texts), len(texts[0].ids))
        return run_all(texts, importance=importance)

    house.packer.packer.run_all = slow  # type: ignore[method-assign]
    before = house.engine.report()["curve"]
    for _ in range(8):
        await house.ask(*(query(first) for first in range(8)))
        await house.answers()
    after = house.engine.report()["curve"]
    assert after[0][1] == pytest.approx(3 * before[0][1], rel=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_classifiers.save(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(with_libraries(tmp_path)))


@pytest.mark.skipif(c_compiler.compiler() is None, reason="needs a C compiler")
async def test_batches_answer_as_transformers_answers_each_alone(folder: Path, cached: None) -> None:
    class Real(Packers):
        def load(self, max_length: int) -> Runtime:
            return timed_runtime.load(folder, 60)

    assert not timed_runtime.is_prepared(folder, 60)
    engine = Engine(Real())
    await engine.hold(60)
    assert timed_runtime.is_prepared(folder, 60)
    assert engine.report()["backend"] == "c"
    theirs = tiny_classifiers.read(folder)
    rng = np.random.default_rng(3)
    texts = [rng.integers(2, tiny_classifiers.VOCABULARY, length) for length in rng.integers(1, 61, 40)]
    types = [rng.integers(0, 2, len(text)) for text in texts]
    queries = [
        Query(text.astype("<i4").tobytes(), len(text), None, 1.0, types=pair.astype("u1").tobytes())
        for text, pair in zip(texts, types, strict=True)
    ]
    answers = await asyncio.gather(*(engine.infer(each) for each in queries))
    assert engine.report()["passes"] < len(texts), "some were computed together"
    for text, pair, answer in zip(texts, types, answers, strict=True):
        assert isinstance(answer, Answer)
        both = {"input_ids": torch.from_numpy(text)[None], "token_type_ids": torch.from_numpy(pair)[None]}
        with torch.inference_mode():
            wanted = theirs(**both).logits[0]
        np.testing.assert_allclose(np.frombuffer(answer.logits, "<f4"), wanted, atol=1e-4)
