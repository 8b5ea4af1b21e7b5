"""The gateway's classifier against scripted replicas: what is answered, retried, shed, cut or refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.doubles import report
from support.scripted_replicas import ANSWERS, Act, refuses
from support.text_service import ANSWER, LOGITS, TextService, save_tokenizer

from pliant.config.tenants import TenantConfig
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Query
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLeftError, ReplicaLostError
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.tenants import Account, act_for

pytestmark = pytest.mark.virtual_time

Build = Callable[..., TextService]
PLAIN = ClassifyParameters()
DIES, STOPS = Act(dies=True), Act(stops=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build(folder: Path) -> Build:
    return partial(TextService, folder)


async def test_the_likeliest_label_comes_first(build: Build) -> None:
    service = build({"r": [ANSWERS]})
    [prediction] = await service.classifier.classify(["a b"], PLAIN)
    assert prediction.labels == ["y", "z", "x"]
    assert prediction.scores == pytest.approx(sorted(np.exp(LOGITS) / np.exp(LOGITS).sum(), reverse=True))
    assert prediction.warning is None
    assert np.frombuffer(service.queries[0].ids, "<i4").tolist() == [2, 4, 5, 3]
    assert service.recorder.events == [("arrived", 4), ("answered", 8, 4, True)]
    assert service.recorder.ends == [Outcome.OK]


@pytest.mark.parametrize(("function", "scores"), [("none", [2, 1]), ("sigmoid", [0.8808, 0.7311])])
async def test_other_scores_on_request(build: Build, function: Any, scores: list[float]) -> None:
    parameters = ClassifyParameters(function_to_apply=function, top_k=2)
    [prediction] = await build({"r": [ANSWERS]}).classifier.classify(["a"], parameters)
    assert prediction.labels == ["y", "z"]
    assert prediction.scores == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize(("function", "score"), [(None, 0.8808), ("none", 2.0)])
async def test_a_model_of_one_label_says_how_true_it_is(build: Build, function: Any, score: float) -> None:
    def answer(_query: Query) -> Answer:
        return Answer(np.array([2.0], np.float32).tobytes(), 8, 8)

    service = build({"r": [ANSWERS]}, answer=answer, labels=("relevant",))
    [prediction] = await service.classifier.classify(["a"], ClassifyParameters(function_to_apply=function))
    assert prediction.labels == ["relevant"]
    assert prediction.scores == pytest.approx([score], abs=1e-4)


async def test_the_texts_of_a_request_travel_together(build: Build) -> None:
    service = build({"r": [ANSWERS]})
    assert len(await service.classifier.classify(["a"] * 64, PLAIN)) == 64
    [parcel] = service.replicas.parcels
    assert len(parcel.queries) == 64
    assert service.recorder.ends == [Outcome.OK] * 64


async def test_a_lost_replica_costs_a_retry_and_no_deadline(build: Build) -> None:
    service = build({"a": [DIES], "b": [ANSWERS]})
    await service.classifier.classify(["a"], ClassifyParameters(slo_ms=10))
    assert [query.budget_s is None for query in service.queries] == [False, True]
    assert service.recorder.retries == ["lost"]
    assert service.recorder.events[1:] == [("answered", 8, 3, False)]
    assert service.recorder.ends == [Outcome.OK]


async def test_when_the_only_replica_is_lost_the_next_one_is_waited_for(build: Build) -> None:
    service = build({"a": [DIES], "b": [ANSWERS]})
    service.table.sync({"a": report(8)})
    answer = asyncio.create_task(service.classifier.classify(["a"], ClassifyParameters(slo_ms=100)))
    await asyncio.sleep(3)
    service.table.sync({"b": report(8)})
    await answer
    assert service.replicas.asked == ["a", "b"]
    assert service.queries[1].budget_s is None
    assert service.recorder.retries == ["lost"]
    assert service.recorder.ends == [Outcome.OK]


async def test_a_text_that_kills_replicas_is_given_up(build: Build) -> None:
    service = build({name: [DIES] for name in "abcd"})
    with pytest.raises(RequestError, match="3 replicas of topics failed over this request; the last: it died") as error:
        await service.classifier.classify(["a"], PLAIN)
    assert error.value.outcome == Outcome.UNAVAILABLE
    assert len(service.replicas.asked) == 3


async def test_no_replica_at_all_is_an_end_in_time(build: Build) -> None:
    service = build({}, timeout_s=0.2, slo_ms=100)
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"answered within 0\.2 s") as error:
        await service.classifier.classify(["a"], PLAIN)
    assert error.value.outcome == Outcome.UNAVAILABLE
    assert 0.2 <= time.monotonic() - started <= 0.25 + 1e-6
    assert service.recorder.events == [("arrived", 3)]
    assert service.recorder.ends == [Outcome.UNAVAILABLE]
    assert not service.recorder.retries


async def test_a_refusal_teaches_the_table_and_is_tried_again(build: Build) -> None:
    service = build({"r": [refuses("moved", report=report(4, version=9)), ANSWERS]})
    await service.classifier.classify(["a"], PLAIN)
    assert service.table.replicas()["r"]["max_length"] == 4
    assert service.recorder.retries == ["moved"]


async def test_who_refused_is_not_asked_again(build: Build) -> None:
    busy = refuses("busy", retry_after_s=1.0)
    service = build({"a": [busy], "b": [busy], "c": [ANSWERS]})
    await service.classifier.classify(["a"], PLAIN)
    assert sorted(service.replicas.asked) == ["a", "b", "c"]
    assert service.recorder.retries == ["busy"] * 2
    assert service.recorder.ends == [Outcome.OK]


async def test_when_all_have_refused_the_soonest_says_when_to_come_back(build: Build) -> None:
    service = build({"a": [refuses("busy", retry_after_s=2.0)], "b": [refuses("busy", retry_after_s=0.5)]})
    with pytest.raises(RequestError, match="too busy") as error:
        await service.classifier.classify(["a"], PLAIN)
    assert (error.value.outcome, error.value.retry_after_s) == (Outcome.SHED, 0.5)
    assert sorted(service.replicas.asked) == ["a", "b"]
    assert service.recorder.events == [("arrived", 3), "shed"]


async def test_a_text_of_low_utility_that_is_refused_says_nothing_of_the_number_of_replicas(build: Build) -> None:
    service = build({"a": [refuses("busy", retry_after_s=2.0)]})
    with pytest.raises(RequestError, match="too busy"):
        await service.classifier.classify(["a"], ClassifyParameters(utility=0.5))
    assert service.recorder.events == [("arrived", 3)]


@pytest.mark.parametrize(
    ("script", "service_s", "others_s", "slo_ms", "outcome", "retry_after_s", "reason"),
    [
        (ANSWERS, 0.1, 3.0, 600, Outcome.SHED, 2.5, "too busy"),
        (Act(0.2, refusal=refuses("moved").refusal), 0.1, 0.0, 250, Outcome.SHED, 0.1, "too busy"),
        (ANSWERS, 60, 0.0, 600, Outcome.TOO_LATE, 1, "even when idle: this text takes about 60000.0 ms"),
        (refuses("busy", retry_after_s=0.01), 0.1, 0.0, 600, Outcome.SHED, 0.01, "too busy"),
    ],
)
async def test_what_cannot_be_in_time_is_refused_with_a_time_to_come_back(
    build: Build,
    script: Act,
    service_s: float,
    others_s: float,
    slo_ms: float,
    outcome: Outcome,
    retry_after_s: float,
    reason: str,
) -> None:
    service = build({"a": [script], "b": [script]}, service_s=service_s)
    for replica in "ab":
        held = report(8, service_s=service_s)
        held["held"] = {"another gateway": others_s}
        service.table.observe(replica, held)
    with pytest.raises(RequestError, match=reason) as error:
        await service.classifier.classify(["a"], ClassifyParameters(slo_ms=slo_ms))
    assert (error.value.outcome, error.value.retry_after_s) == (outcome, pytest.approx(retry_after_s))
    assert error.value.fault == (Fault.SHORT_SLO if outcome == Outcome.TOO_LATE else None)
    assert service.recorder.ends == [outcome]


async def test_what_is_too_long_is_rejected_with_the_limit(build: Build) -> None:
    service = build({"r": [ANSWERS]})
    for text in ("a " * 7, "a" * 10_000):
        with pytest.raises(RequestError, match="takes at most 8") as error:
            await service.classifier.classify([text], PLAIN)
        assert error.value.fault == Fault.TOO_LONG
    assert service.recorder.ends == [Outcome.REJECTED] * 2
    assert not service.recorder.events


async def test_too_long_is_cut_with_a_warning_where_the_operator_says_so(build: Build) -> None:
    service = build({"r": [ANSWERS]}, truncate=True)
    short, cut, long = await service.classifier.classify(["a", "a " * 7, "a " * 5_000], PLAIN)
    assert short.warning is None
    assert cut.warning == "text cut to the first 8 of 9 tokens"
    assert long.warning is not None
    assert long.warning.startswith("text cut to the first 8 of more than")
    ids = [np.frombuffer(query.ids, "<i4").tolist() for query in service.queries]
    assert sorted(ids) == sorted([[2, 4, 3], [2, 4, 4, 4, 4, 4, 4, 3], [2, 4, 4, 4, 4, 4, 4, 3]])


async def test_tokens_are_those_that_would_be_read(build: Build) -> None:
    classifier = build({"r": [ANSWERS]}).classifier
    counts = [await classifier.tokens(text) for text in ("", "a", "a " * 6, "a " * 7, "a " * 5_000)]
    assert counts == [2, 3, 8, 8, 8]


async def test_leaving_cancels_every_text(build: Build) -> None:
    service = build({"r": [STOPS]})
    task = asyncio.create_task(service.classifier.classify(["a"] * 5, PLAIN))
    await asyncio.sleep(0.01)
    assert service.replicas.working["r"] == 5
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.001)
    assert service.replicas.working["r"] == 0
    assert service.replicas.cancelled["r"] == 5
    assert service.table.replicas()["r"]["outstanding"] == 0
    assert service.recorder.events == [("arrived", 3)] * 5
    assert service.recorder.ends == [Outcome.CANCELLED] * 5


RAISES = Act(error=ReplicaLostError("ValueError: what"))


@pytest.mark.parametrize("act", [RAISES, refuses("failed", "ValueError: what")], ids=["on the way", "in the engine"])
async def test_what_a_replica_raises_is_tried_elsewhere(build: Build, act: Act) -> None:
    service = build({"a": [act], "b": [ANSWERS]})
    await service.classifier.classify(["a"], PLAIN)
    assert service.replicas.asked == ["a", "b"]
    assert service.recorder.retries == ["lost"]
    assert service.recorder.ends == [Outcome.OK]
    alone = build({name: [act] for name in "abc"})
    with pytest.raises(RequestError, match="failed over this request; the last: ValueError: what"):
        await alone.classifier.classify(["a"], PLAIN)
    assert alone.recorder.ends == [Outcome.UNAVAILABLE]


async def test_what_nobody_expects_is_counted_and_raised(build: Build) -> None:
    service = build({"r": [ANSWERS]})

    def broken(_tokens: int) -> None:
        raise ValueError("what")

    service.recorder.arrived = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="what"):
        await service.classifier.classify(["a"], PLAIN)
    assert service.recorder.ends == [Outcome.FAILED]


async def test_a_replica_that_hangs_is_done_without(build: Build) -> None:
    service = build({"a": [STOPS], "b": [ANSWERS]})
    started = time.monotonic()
    [prediction] = await service.classifier.classify(["a"], PLAIN)
    assert prediction.labels[0] == "y"
    assert time.monotonic() - started < 0.5
    assert service.replicas.asked == ["a", "b"]
    assert service.recorder.retries == ["stalled"]
    assert service.recorder.ends == [Outcome.OK]
    await asyncio.sleep(0.001)
    assert not +service.replicas.working, "who lost the race is cancelled"


async def test_texts_that_wait_for_a_replica_on_the_move_have_their_time_once_more_and_no_more_than_that(
    build: Build,
) -> None:
    service = build({"r": [ANSWERS]}, service_s=0.1, slo_ms=1000)
    service.table.stop_routing({"r"})
    texts = [asyncio.create_task(service.classifier.classify(["a"], PLAIN)) for _ in range(30)]
    await asyncio.sleep(5)
    assert not service.recorder.ends
    assert not service.recorder.retries
    service.table.stop_routing(())
    await asyncio.gather(*texts, return_exceptions=True)
    assert service.recorder.ends.count(Outcome.OK) == 10
    assert service.recorder.ends.count(Outcome.SHED) == 20
    assert all(query.budget_s is not None and query.budget_s > 0.9 for query in service.queries)


@pytest.mark.parametrize(
    "scripts", [{}, {"r": [Act(error=NotDeployedError())]}, {"r": [Act(error=ReplicaLeftError())]}]
)
async def test_who_can_do_without_an_answer_does_not_wait_for_replicas(
    build: Build, scripts: dict[str, Sequence[Act]]
) -> None:
    service = build(scripts)
    started = time.monotonic()
    with pytest.raises(RequestError, match="no replica of topics takes 3 tokens now") as error:
        await service.classifier.read("a", 1.0, within_s=60)
    assert time.monotonic() - started < 0.1
    assert (error.value.outcome, error.value.fault) == (Outcome.UNAVAILABLE, Fault.DOWN)
    assert service.recorder.ends == [Outcome.UNAVAILABLE]


async def test_who_can_do_without_an_answer_does_not_wait_too_long_either(build: Build) -> None:
    service = build({"r": [STOPS]})
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"no replica of topics answered within 0\.02 s") as error:
        await service.classifier.read("a", 1.0, within_s=0.02)
    assert time.monotonic() - started == pytest.approx(0.02)
    assert (error.value.outcome, error.value.fault) == (Outcome.UNAVAILABLE, Fault.TIMED_OUT)
    assert service.recorder.ends == [Outcome.UNAVAILABLE]
    hopeless = build({"r": [ANSWERS]}, service_s=60.0)
    with pytest.raises(RequestError, match="even when idle") as error:
        await hopeless.classifier.read("a", 1.0)
    assert (error.value.outcome, error.value.fault) == (Outcome.TOO_LATE, Fault.SHORT_SLO)


async def test_a_reading_tells_what_a_cascade_asks_for(build: Build) -> None:
    told = Answer(LOGITS.tobytes(), 8, 8, np.arange(4, dtype=np.float32).tobytes(), 0.125, 0.25)
    service = build(
        {"a": [ANSWERS, DIES], "b": [ANSWERS]}, answer=lambda query: told if query.importance_request else ANSWER
    )
    reading = await service.classifier.read("a b", 0.5, 0.25, ImportanceRequest(1.5, 0.9))
    assert reading.logits.tolist() == LOGITS.tolist()
    assert reading.importance is not None
    assert reading.importance.tolist() == [0, 1, 2, 3]
    assert (reading.importance_s, reading.compute_s) == (0.125, 0.25)
    assert len(reading.encoding) == 4
    assert not reading.interrupted
    service.table.stop_routing({"b"})
    asked = asyncio.create_task(service.classifier.read("a", None))
    await asyncio.sleep(0.01)
    service.table.stop_routing(())
    again = await asked
    assert again.importance is None
    assert again.interrupted
    assert service.replicas.asked == ["a", "a", "b"]
    first, second, _ = service.queries
    assert first.importance_request == (1.5, 0.9)
    assert first.budget_s is not None
    assert 0.4 < first.budget_s <= 0.5
    assert first.slack_share == 0.25
    assert second.importance_request is None
    assert second.budget_s is None
    assert [event[0] for event in service.recorder.events] == ["arrived", "answered"] * 2


async def test_to_tell_of_tokens_takes_longer_than_predicted_and_is_no_failure(build: Build) -> None:
    slow_teller = Act(1.0, pieces=None)
    service = build({"a": [slow_teller], "b": [slow_teller]}, service_s=0.2)
    reading = await service.classifier.read("a b", None, importance_request=ImportanceRequest(1.0, 2.0))
    assert not reading.interrupted
    assert service.recorder.retries == []
    plain = await service.classifier.read("a b", None)
    assert plain.interrupted
    assert service.recorder.retries == ["stalled"]


async def test_a_service_is_down_when_nothing_is_held_and_ready_when_the_longest_is(build: Build) -> None:
    service = build({})
    assert service.classifier.down
    service.table.sync({"r": report(4)})
    assert not service.classifier.down
    assert not service.classifier.ready
    service.table.observe("r", report(8, version=2))
    assert service.classifier.ready


async def test_a_service_whose_longest_was_ejected_is_ready_again_though_nobody_asks(build: Build) -> None:
    service = build({"long": [ANSWERS], "short": [ANSWERS]})
    service.table.observe("short", report(4, version=2))
    for _ in range(3):
        service.table.failed("long")
    assert not service.classifier.ready
    await asyncio.sleep(1.1)
    assert service.classifier.ready


async def test_only_cascades_have_details(build: Build) -> None:
    with pytest.raises(RequestError, match=r"parameters\.details: topics is no cascade") as error:
        await build({"r": [ANSWERS]}).classifier.classify(["a"], ClassifyParameters(details=True))
    assert error.value.outcome == Outcome.REJECTED


async def test_tokens_count_that_are_computed_and_no_others(build: Build) -> None:
    account = Account("a", TenantConfig(tokens_per_minute=100))
    act_for(account)
    service = build({"r": [refuses("busy"), ANSWERS]})
    with pytest.raises(RequestError, match="too busy"):
        await service.classifier.classify(["a b"], PLAIN)
    assert (account.facts()["tokens"], account.facts()["remaining_tokens"]) == (0, 100)
    await service.classifier.classify(["a b"], PLAIN)
    assert (account.facts()["tokens"], account.facts()["remaining_tokens"]) == (4, 96)
