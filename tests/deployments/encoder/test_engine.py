"""The encoder engine: order, admission, switching and cancellation, with a runtime that only sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.doubles import Sleeper, Sleepers
from support.waiting import until

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder import engine as engine_module
from pliant.deployments.encoder import runtimes
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.engine import Engine, LoadError
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Query
from pliant.deployments.encoder.runtimes import ModelRuntimes
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk
from pliant.errors import ModelError
from pliant.policies.encoder.confidence import softmax


def query(first: int = 1, length: int = 4, budget_s: float | None = None, slack_share: float = 1.0) -> Query:
    return Query(np.array([first] * length, dtype="<i4").tobytes(), length, budget_s, slack_share)


def logits(answer: Answer | Refusal) -> list[float]:
    assert isinstance(answer, Answer)
    return np.frombuffer(answer.logits, dtype="<f4").tolist()


@pytest.fixture
def sleepers() -> Sleepers:
    return Sleepers()


@pytest.fixture
async def engine(sleepers: Sleepers) -> Engine:
    engine = Engine(sleepers)
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
    assert refusal.report
    assert (refusal.cause, refusal.report["max_length"]) == ("moved", 8)


async def test_the_queue_is_bounded_by_the_budget(engine: Engine) -> None:
    budget_s = 5.5 * engine.report()["service_s"]
    replies = await asyncio.gather(*(engine.infer(query(budget_s=budget_s)) for _ in range(20)))
    answered = [reply for reply in replies if isinstance(reply, Answer)]
    refused = [reply for reply in replies if isinstance(reply, Refusal)]
    assert 3 <= len(answered) <= 5
    assert len(refused) == 20 - len(answered)
    for refusal in refused:
        assert (refusal.cause, refusal.outcome) == ("busy", Outcome.SHED)
        assert refusal.retry_after_s
        assert 0 < refusal.retry_after_s < 1


async def test_waits_that_were_longer_than_predicted_are_expected_to_be(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled:
        """Learns that waits are twice as long."""

        value = 1.0

        def observe(self, predicted_s: float, seconds: float, budget_s: float) -> None:
            observed.append(predicted_s)

    observed: list[float] = []
    monkeypatch.setattr(engine_module, "Margin", Doubled)
    doubled = Engine(sleepers)
    await doubled.hold(8)
    service_s = doubled.report()["service_s"]
    replies = await asyncio.gather(*(doubled.infer(query(budget_s=9.5 * service_s)) for _ in range(20)))
    assert [type(reply) for reply in replies] == [Answer] * 5 + [Refusal] * 15, "four may wait: a wait of 8.5, halved"
    assert observed == pytest.approx([service_s * place for place in range(1, 6)])
    assert doubled.report()["margins"] == {"anonymous": 1.0}


async def test_low_utility_does_not_wait(engine: Engine) -> None:
    replies = await asyncio.gather(*(engine.infer(query(budget_s=1.0, slack_share=0)) for _ in range(3)))
    assert [type(reply) for reply in replies] == [Answer, Refusal, Refusal]


async def test_switching_finishes_what_was_accepted_and_refuses_meanwhile(engine: Engine) -> None:
    before = engine.report()["version"]
    accepted = [asyncio.create_task(engine.infer(query())) for _ in range(3)]
    await asyncio.sleep(0)
    switch = asyncio.create_task(engine.hold(16))
    await until(lambda: not engine.held)
    meanwhile = await engine.infer(query())
    assert isinstance(meanwhile, Refusal)
    assert meanwhile.cause == "moved"
    assert meanwhile.report
    assert (meanwhile.report["max_length"], meanwhile.report["curve"]) == (0, ())
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
    engine = Engine(sleepers)
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


async def test_a_switch_goes_on_when_whoever_wanted_it_is_gone(engine: Engine) -> None:
    accepted = asyncio.create_task(engine.infer(query()))
    await asyncio.sleep(0)
    switch = asyncio.create_task(engine.hold(16))
    await until(lambda: not engine.held)
    switch.cancel()
    await asyncio.gather(switch, return_exceptions=True)
    assert switch.cancelled()
    assert (await engine.hold(16))["max_length"] == 16
    assert isinstance(await accepted, Answer)
    assert isinstance(await engine.infer(query(length=16)), Answer)


async def test_renewing_interrupts_nothing_and_is_reported(engine: Engine, sleepers: Sleepers) -> None:
    before = engine.report()
    answers = [asyncio.create_task(engine.infer(query())) for _ in range(3)]
    sleepers.backend = "faster"
    await engine.renew(8)
    assert all(isinstance(answer, Answer) for answer in await asyncio.gather(*answers))
    after = engine.report()
    assert (before["backend"], after["backend"], after["max_length"]) == ("sleeper", "faster", 8)
    assert after["version"] > before["version"]


async def test_what_is_renewed_is_measured_anew(engine: Engine, sleepers: Sleepers) -> None:
    """Whatever it calls itself: a graph is one of compiled code or not."""
    await engine.renew(8)
    assert sleepers.loaded[-1].seen


async def test_nothing_is_renewed_where_nothing_is_held(sleepers: Sleepers) -> None:
    engine = Engine(sleepers)
    await engine.renew(8)
    assert not sleepers.loaded


async def test_of_a_set_only_the_runtime_that_was_compiled_is_loaded_anew(sleepers: Sleepers) -> None:
    engine = Engine(sleepers)
    await engine.hold(8, (8, 16))
    before = len(sleepers.loaded)
    await engine.renew(8)
    await engine.renew(32)
    assert [each.max_length for each in sleepers.loaded[before:]] == [8]
    assert engine.report()["lengths"] == (8, 16)


async def test_what_took_all_lengths_is_not_taken_for_one_of_a_set(sleepers: Sleepers) -> None:
    sleepers.resident = True
    load = sleepers.load
    sleepers.load = lambda _length: load(16)  # type: ignore[method-assign]
    engine = Engine(sleepers)
    await engine.hold(8)
    assert engine.report()["lengths"] == (16,)
    sleepers.resident, sleepers.load = False, load  # type: ignore[method-assign]
    assert (await engine.hold(8, (8, 16)))["lengths"] == (8, 16)
    assert (await engine.hold(8))["lengths"] == (8,)


async def test_computed_tokens_include_padding(engine: Engine) -> None:
    answer = await engine.infer(query(length=5))
    assert isinstance(answer, Answer)
    assert answer.computed == 8
    report = engine.report()
    assert (report["tokens"], report["computed_tokens"]) == (5, 8)


async def test_a_dynamic_runtime_pads_nothing() -> None:
    engine = Engine(Sleepers(dynamic=True))
    await engine.hold(8)
    answer = await engine.infer(query(length=5))
    assert isinstance(answer, Answer)
    assert (answer.max_length, answer.computed) == (8, 5)


class Reader(Sleeper):
    """Lets so many seconds of `clock` pass for each token, and four times as many for its importance."""

    per_token_s = 5e-4

    def __init__(self, max_length: int, clock: Clock) -> None:
        super().__init__(max_length, dynamic=True)
        self.slower = 1.0
        self._clock = clock

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        self._clock.now += self.slower * self.per_token_s * len(ids)
        return np.zeros(2, np.float32)

    def with_importance(
        self, ids: np.ndarray | Sequence[int], types: object, wanted: Callable[[np.ndarray], bool]
    ) -> SimpleNamespace:
        logits = self(ids)
        importance_s = 4 * self.per_token_s * len(ids)
        self._clock.now += importance_s
        return SimpleNamespace(logits=logits, importance=np.zeros(len(ids), np.float32), importance_s=importance_s)


class Readers(Sleepers):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def load(self, max_length: int) -> Runtime:
        return Reader(max_length, self._clock)


class Clock:
    """Stands still unless somebody moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
async def reading(monkeypatch: pytest.MonkeyPatch) -> Engine:
    clock = Clock()
    for module in ("engine", "computing"):
        monkeypatch.setattr(f"pliant.deployments.encoder.{module}.time", clock)
    engine = Engine(Readers(clock))
    await engine.hold(256)
    return engine


async def test_a_short_text_has_time_where_the_longest_has_none(reading: Engine) -> None:
    assert reading.report()["service_s"] >= 0.125
    assert isinstance(await reading.infer(query(length=10, budget_s=0.1)), Answer)
    refusal = await reading.infer(query(length=256, budget_s=0.1))
    assert isinstance(refusal, Refusal)
    assert refusal.cause == "busy"


async def test_short_texts_tell_nothing_of_long_ones(reading: Engine) -> None:
    for _ in range(20):
        await reading.infer(query(length=16))
    replies = await asyncio.gather(*(reading.infer(query(length=256, budget_s=0.3)) for _ in range(12)))
    assert 1 <= sum(isinstance(reply, Answer) for reply in replies) <= 2


async def test_a_runtime_that_has_become_slower_is_expected_to_be(reading: Engine) -> None:
    before = reading.report()["curve"]
    reader = reading.held
    assert isinstance(reader, Reader)
    reader.slower = 3.0
    for _ in range(10):
        await reading.infer(query(length=16))
    after = reading.report()["curve"]
    assert after[0][1] > 2 * before[0][1]
    assert [point[2] for point in after] == [point[2] for point in before], "what was measured stays"


async def test_to_tell_of_tokens_is_no_part_of_what_a_text_takes(reading: Engine) -> None:
    before_s = reading.report()["service_s"]
    for _ in range(10):
        answer = await reading.infer(query(length=32)._replace(importance_request=ImportanceRequest(1.0, 2.0)))
        assert isinstance(answer, Answer)
        assert answer.importance
        assert answer.importance_s == pytest.approx(4 * answer.compute_s)
    assert reading.report()["service_s"] == pytest.approx(before_s)


async def test_three_computations_in_a_row_that_raise_make_a_replica_unhealthy(engine: Engine) -> None:
    desk: Desk[Query, Answer] = Desk("topics", engine.infer, engine.seconds)
    runtime: Any = engine.held
    for refused in (1, 2, 3):
        desk.check()
        runtime.fails = RuntimeError("CUDA error: an illegal memory access")
        reply = await desk.one(Parcel("a", "g", (query(),)))
        assert isinstance(reply, Refusal)
        assert reply.cause == "failed", refused
    with pytest.raises(RuntimeError, match="3 queries in a row broke down, the last with RuntimeError: CUDA error"):
        desk.check()
    runtime.fails = None
    assert isinstance(await desk.one(Parcel("a", "g", (query(),))), Answer)
    desk.check()
    assert engine.report()["waiting"] == 0
    assert desk.held.amounts() == {}


async def test_a_replica_says_what_it_holds_of_whom_in_seconds_of_work(engine: Engine) -> None:
    desk: Desk[Query, Answer] = Desk("topics", engine.infer, engine.seconds)
    asked = [asyncio.create_task(desk.one(Parcel("a", gateway, (query(),)))) for gateway in "ggh"]
    await asyncio.sleep(0)
    service_s = engine.report()["service_s"]
    assert desk.held.amounts() == pytest.approx({"g": 2 * service_s, "h": service_s})
    await asyncio.gather(*asked)
    assert desk.held.amounts() == {}


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

    def with_importance(
        self, ids: np.ndarray | Sequence[int], types: object, wanted: Callable[[np.ndarray], bool]
    ) -> SimpleNamespace:
        logits = self(ids)
        if not wanted(logits):
            return SimpleNamespace(logits=logits, importance=None, importance_s=0.0)
        return SimpleNamespace(logits=logits, importance=np.arange(len(ids), dtype=np.float32), importance_s=0.25)


class Tellers(Sleepers):
    def load(self, max_length: int) -> Runtime:
        return Teller(max_length)


async def test_importance_is_told_of_answers_that_are_not_sure() -> None:
    engine, plain = Engine(Tellers()), Engine(Sleepers())
    await asyncio.gather(engine.hold(16), plain.hold(16))
    unasked = query(length=5)
    sure = float(softmax(logits(await engine.infer(unasked)), 2.0).max())
    asked = unasked._replace(importance_request=ImportanceRequest(2.0, sure + 1e-3))
    surer = unasked._replace(importance_request=ImportanceRequest(2.0, sure - 1e-3))
    told, untold, unable = await engine.infer(asked), await engine.infer(surer), await plain.infer(asked)
    assert isinstance(told, Answer)
    assert isinstance(untold, Answer)
    assert isinstance(unable, Answer)
    assert np.frombuffer(told.importance, "<f4").tolist() == [0, 1, 2, 3, 4]
    assert told.importance_s == 0.25
    assert told.logits == untold.logits == unable.logits
    assert untold.importance == unable.importance == b""
    assert untold.importance_s == 0


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
    plain, attentive = Kernel(), Kernel(ModelError("m does not tell how its tokens attend to each other"))
    monkeypatch.setattr(runtimes, "_kernel", lambda importance: attentive if importance else plain)
    monkeypatch.setattr(runtimes.sources, "fetch", lambda _model, **_: Path())
    return plain, attentive


def encoder(**options: Any) -> EncoderConfig:
    return EncoderConfig(
        kind="encoder", model="m", lengths=(8, 16), residency="one", replicas={"min": 1, "max": 1}, **options
    )


async def test_a_model_that_cannot_tell_answers_all_the_same(
    kernels: tuple[Kernel, Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    plain, attentive = kernels
    found = ModelRuntimes(encoder(importance=True))
    engine = Engine(found)
    await engine.hold(8)
    found.compile(16, lambda: 0.0)
    await engine.hold(16)
    assert attentive.calls == [("load", 8)]
    assert plain.calls == [("load", 8), ("prepare", 16), ("load", 16)]
    [record] = caplog.records
    assert "m answers, but cascades that begin with it leave out no words; say prune: false there" in record.message
    answer = await engine.infer(query()._replace(importance_request=ImportanceRequest(1.0, 2.0)))
    assert isinstance(answer, Answer)
    assert answer.importance == b""


async def test_a_model_that_cannot_be_loaded_at_all_is_an_error_without_such_a_warning(
    kernels: tuple[Kernel, Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    kernels[0].failure = ModelError("no such file")
    with pytest.raises(LoadError, match="no such file"):
        await Engine(ModelRuntimes(encoder(importance=True))).hold(8)
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
    assert Engine(made).report()["device"] == made.device == runtimes.device(encoder())
    assert ", torch " in made.device
