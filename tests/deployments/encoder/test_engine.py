"""The encoder engine: order, admission, switching and cancellation, with a runtime that only sleeps."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.doubles import Sleeper, Sleepers

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder import runtimes
from pliant.deployments.encoder.engine import Answer, Engine, LoadError, Query, Refusal, Runtime, Telling
from pliant.deployments.encoder.runtimes import ModelRuntimes
from pliant.errors import ModelError
from pliant.policies.encoder.confidence import softmax


def query(first: int = 1, length: int = 4, budget_s: float | None = None, utility: float = 1.0) -> Query:
    return Query(np.array([first] * length, dtype="<i4").tobytes(), length, budget_s, utility)


def logits(answer: Answer | Refusal) -> list[float]:
    assert isinstance(answer, Answer)
    return np.frombuffer(answer.logits, dtype="<f4").tolist()


@pytest.fixture
def sleepers() -> Sleepers:
    return Sleepers()


@pytest.fixture
async def engine(sleepers: Sleepers) -> Engine:
    engine = Engine("replica-1", sleepers)
    await engine.hold(8)
    return engine


async def test_answers_in_order_of_arrival(engine: Engine) -> None:
    answers = await asyncio.gather(*(engine.infer(query(first)) for first in range(5)))
    assert [logits(answer)[1] for answer in answers] == [0, 1, 2, 3, 4]
    assert engine.report()["served"] == 5
    assert engine.report()["waiting"] == 0


async def test_a_text_that_is_too_long_is_refused_with_the_truth(engine: Engine) -> None:
    refusal = await engine.infer(query(length=9))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.replica, refusal.report["max_length"]) == ("length", "replica-1", 8)


async def test_the_queue_is_bounded_by_the_budget(engine: Engine) -> None:
    budget_s = 5.5 * engine.report()["service_s"]
    replies = await asyncio.gather(*(engine.infer(query(budget_s=budget_s)) for _ in range(20)))
    answered = [reply for reply in replies if isinstance(reply, Answer)]
    refused = [reply for reply in replies if isinstance(reply, Refusal)]
    assert 3 <= len(answered) <= 5
    assert all(reply.reason == "busy" and 0 < reply.retry_after_s < 1 for reply in refused)


async def test_low_utility_does_not_wait(engine: Engine) -> None:
    replies = await asyncio.gather(*(engine.infer(query(budget_s=1.0, utility=0)) for _ in range(3)))
    assert [type(reply) for reply in replies] == [Answer, Refusal, Refusal]


async def test_switching_finishes_what_was_accepted_and_refuses_meanwhile(engine: Engine) -> None:
    before = engine.report()["version"]
    accepted = [asyncio.create_task(engine.infer(query())) for _ in range(3)]
    await asyncio.sleep(0)
    switch = asyncio.create_task(engine.hold(16))
    await asyncio.sleep(0)
    meanwhile = await engine.infer(query())
    assert isinstance(meanwhile, Refusal)
    assert meanwhile.report["max_length"] == 0
    assert all(isinstance(answer, Answer) and answer.max_length == 8 for answer in await asyncio.gather(*accepted))
    report = await switch
    assert report["max_length"] == 16
    assert report["version"] > meanwhile.report["version"] > before
    after = await engine.infer(query(length=16))
    assert isinstance(after, Answer)
    assert after.max_length == 16


async def test_holding_what_it_holds_changes_nothing(engine: Engine) -> None:
    before = engine.report()
    assert await engine.hold(8) == before


async def test_a_runtime_that_does_not_load_leaves_the_old_one(engine: Engine, sleepers: Sleepers) -> None:
    sleepers.broken.add(16)
    with pytest.raises(LoadError, match="16 tokens: OSError: cannot load 16"):
        await engine.hold(16)
    answer = await engine.infer(query())
    assert isinstance(answer, Answer)
    assert answer.max_length == 8
    assert engine.report()["failed"] == {16: "OSError: cannot load 16"}
    assert engine.failure is None
    sleepers.broken.clear()
    assert (await engine.hold(16))["failed"] == {}


async def test_without_any_runtime_all_is_refused(sleepers: Sleepers) -> None:
    sleepers.broken = {8, 16}
    engine = Engine("replica-1", sleepers)
    with pytest.raises(LoadError):
        await engine.hold(8)
    assert isinstance(await engine.infer(query()), Refusal)
    assert "cannot load 8" in str(engine.failure)
    sleepers.broken = {8}
    await engine.hold(16)
    assert engine.failure is None


async def test_the_old_runtime_may_be_broken_by_now_too(engine: Engine, sleepers: Sleepers) -> None:
    sleepers.broken = {8, 16}
    with pytest.raises(LoadError):
        await engine.hold(16)
    assert engine.failure is not None
    assert engine.report()["max_length"] == 0


async def test_renewing_interrupts_nothing_and_is_reported(engine: Engine, sleepers: Sleepers) -> None:
    before = engine.report()
    answers = [asyncio.create_task(engine.infer(query())) for _ in range(3)]
    sleepers.backend = "faster"
    await engine.renew()
    assert all(isinstance(answer, Answer) for answer in await asyncio.gather(*answers))
    after = engine.report()
    assert (before["backend"], after["backend"], after["max_length"]) == ("sleeper", "faster", 8)
    assert after["version"] > before["version"]


async def test_nothing_is_renewed_where_nothing_is_held(sleepers: Sleepers) -> None:
    engine = Engine("replica-1", sleepers)
    await engine.renew()
    assert not sleepers.loaded


async def test_computed_tokens_include_padding(engine: Engine) -> None:
    answer = await engine.infer(query(length=5))
    assert isinstance(answer, Answer)
    assert answer.computed == 8
    assert engine.report()["computed_tokens"] == 8


async def test_a_dynamic_runtime_pads_nothing() -> None:
    engine = Engine("replica-1", Sleepers(dynamic=True))
    await engine.hold(8)
    answer = await engine.infer(query(length=5))
    assert isinstance(answer, Answer)
    assert (answer.max_length, answer.computed) == (8, 5)


async def test_cancelled_requests_are_not_computed(engine: Engine, sleepers: Sleepers) -> None:
    sleepers.loaded[0].seen.clear()
    tasks = [asyncio.create_task(engine.infer(query(first))) for first in range(4)]
    await asyncio.sleep(0)
    for task in tasks[1:3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sleepers.loaded[0].seen == [0, 3]
    assert engine.report()["waiting"] == 0


class Teller(Sleeper):
    """A sleeper that says of each token how much attention it received: its index."""

    def tell(self, ids: np.ndarray | Sequence[int], wanted: Callable[[np.ndarray], bool]) -> SimpleNamespace:
        logits = self(ids)
        if not wanted(logits):
            return SimpleNamespace(logits=logits, importance=None, telling_s=0.0)
        return SimpleNamespace(logits=logits, importance=np.arange(len(ids), dtype=np.float32), telling_s=0.25)


class Tellers(Sleepers):
    def load(self, max_length: int) -> Runtime:
        return Teller(max_length)


async def test_importance_is_told_of_answers_that_are_not_sure() -> None:
    engine, plain = Engine("a", Tellers()), Engine("b", Sleepers())
    await asyncio.gather(engine.hold(16), plain.hold(16))
    unasked = query(length=5)
    sure = float(softmax(logits(await engine.infer(unasked)), 2.0).max())
    asked = unasked._replace(telling=Telling(2.0, sure + 1e-3))
    surer = unasked._replace(telling=Telling(2.0, sure - 1e-3))
    told, untold, unable = await engine.infer(asked), await engine.infer(surer), await plain.infer(asked)
    assert isinstance(told, Answer)
    assert isinstance(untold, Answer)
    assert isinstance(unable, Answer)
    assert np.frombuffer(told.importance, "<f4").tolist() == [0, 1, 2, 3, 4]
    assert told.telling_s == 0.25
    assert told.logits == untold.logits == unable.logits
    assert untold.importance == unable.importance == b""
    assert untold.telling_s == 0


class Kernel:
    """Loads sleepers, unless it is to fail."""

    def __init__(self, failure: ModelError | None = None) -> None:
        self.failure = failure
        self.calls: list[tuple[str, int]] = []

    def load(self, max_length: int, **_: Any) -> Runtime:
        self.calls.append(("load", max_length))
        if self.failure:
            raise self.failure
        return Sleeper(max_length, service_s=0.0)

    def prepare(self, max_length: int, **_: Any) -> None:
        self.calls.append(("prepare", max_length))

    def is_prepared(self, max_length: int, **_: Any) -> bool:
        return ("prepare", max_length) in self.calls


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Kernel]:
    """A plain one, and one that should tell, but cannot."""
    plain, telling = Kernel(), Kernel(ModelError("m does not tell how its tokens attend to each other"))
    monkeypatch.setattr(runtimes, "_kernel", lambda tells: telling if tells else plain)
    monkeypatch.setattr(runtimes.sources, "fetch", lambda _model, **_: Path())
    return plain, telling


def encoder(**options: Any) -> EncoderConfig:
    return EncoderConfig(kind="encoder", model="m", lengths=(8, 16), replicas={"min": 1, "max": 1}, **options)


async def test_a_model_that_cannot_tell_answers_all_the_same(
    kernels: tuple[Kernel, Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    plain, telling = kernels
    found = ModelRuntimes(encoder(importance=True))
    engine = Engine("a", found)
    await engine.hold(8)
    found.compile(16, lambda: 0.0)
    await engine.hold(16)
    assert telling.calls == [("load", 8)]
    assert plain.calls == [("load", 8), ("prepare", 16), ("load", 16)]
    [record] = caplog.records
    assert "m answers, but cascades that begin with it leave out no words; say prune: false there" in record.message
    answer = await engine.infer(query()._replace(telling=Telling(1.0, 2.0)))
    assert isinstance(answer, Answer)
    assert answer.importance == b""


async def test_a_model_that_cannot_be_loaded_at_all_is_an_error_without_such_a_warning(
    kernels: tuple[Kernel, Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    kernels[0].failure = ModelError("no such file")
    with pytest.raises(LoadError, match="no such file"):
        await Engine("a", ModelRuntimes(encoder(importance=True))).hold(8)
    assert not caplog.records


def test_what_is_not_compiled_yet_is_missing(kernels: tuple[Kernel, Kernel]) -> None:
    found = ModelRuntimes(encoder())
    assert found.missing() == {8, 16}
    found.compile(8, lambda: 0.0)
    assert found.missing() == {16}
    found.compile(16, lambda: 0.0)
    found.load(12)
    assert found.missing() == {12}, "the planner may have chosen another length"


def test_reports_name_the_device(kernels: tuple[Kernel, Kernel]) -> None:
    made = ModelRuntimes(encoder())
    assert Engine("a", made).report()["device"] == made.device == runtimes.device(encoder())
    assert ", torch " in made.device
