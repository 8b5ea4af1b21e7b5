"""The encoder engine: order, admission, switching and cancellation, with a runtime that only sleeps."""

import asyncio

import numpy as np
import pytest
from doubles import SERVICE_S, Sleepers

from pliant.deployments.encoder.engine import Answer, Engine, LoadError, Query, Refusal


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
    replies = await asyncio.gather(*(engine.infer(query(budget_s=5.5 * SERVICE_S)) for _ in range(20)))
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


async def test_preparing_does_not_interrupt(engine: Engine, sleepers: Sleepers) -> None:
    await engine.prepare(16)
    assert sleepers.prepared == [16]
    assert engine.report()["max_length"] == 8


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
    await asyncio.sleep(SERVICE_S / 2)
    for task in tasks[1:3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sleepers.loaded[0].seen == [0, 3]
    assert engine.report()["waiting"] == 0
