"""The gateway's classifier against scripted replicas: what is answered, retried, shed, cut or refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pliant.deployments.encoder.routing_table import RoutingTable
from support.doubles import report
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.engine import Answer, Query, Refusal, Telling
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.errors import NotDeployedError, ReplicaLostError
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError, Retry
from pliant.models.sources import ModelInfo
from pliant.policies.encoder.admission import DeadlineError
from pliant.policies.encoder.dispatch import NoRuntimeError

pytestmark = pytest.mark.virtual_time

LOGITS = np.array([0.0, 2.0, 1.0], dtype=np.float32)
ANSWER = Answer(LOGITS.tobytes(), 8, 8)
REPORT = report(4, version=9)
Reply = Answer | Refusal | Exception


class Recorder:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.ends: list[Outcome] = []

    def arrived(self, tokens: int) -> None:
        self.events.append(("arrived", tokens))

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None:
        self.events.append(("answered", answer.max_length, tokens, seconds <= slo_s))

    def shed(self) -> None:
        self.events.append("shed")

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome)

    def retried(self, why: Retry) -> None:
        self.events.append(why)


class Replicas:
    """Gives the scripted replies in turn, the last for ever."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.queries: list[Query] = []

    async def __call__(self, query: Query) -> Answer | Refusal:
        self.queries.append(query)
        await asyncio.sleep(0)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def build(folder: Path) -> Callable[..., tuple[Classifier, Recorder, RoutingTable]]:
    def build(call: Replicas, **options: Any) -> tuple[Classifier, Recorder, RoutingTable]:
        config = EncoderConfig(kind="encoder", model="m", lengths=(4, 8), replicas={"min": 2, "max": 2}, **options)
        info = ModelInfo(labels=("x", "y", "z"), max_length=8, pad_token_id=0, architecture="B", multi_label=False)
        table, recorder = RoutingTable(1.0), Recorder()
        return Classifier("topics", config, folder, info, table, call, recorder), recorder, table

    return build


Build = Callable[..., tuple[Classifier, Recorder, RoutingTable]]


async def test_the_likeliest_label_comes_first(build: Build) -> None:
    replicas = Replicas(ANSWER)
    classifier, recorder, _ = build(replicas)
    [prediction] = await classifier.classify(["a b"], ClassifyParameters())
    assert prediction.labels == ["y", "z", "x"]
    assert prediction.scores == pytest.approx(sorted(np.exp(LOGITS) / np.exp(LOGITS).sum(), reverse=True))
    assert prediction.warning is None
    assert np.frombuffer(replicas.queries[0].ids, "<i4").tolist() == [2, 4, 5, 3]
    assert recorder.events == [("arrived", 4), ("answered", 8, 4, True)]
    assert recorder.ends == [Outcome.OK]


@pytest.mark.parametrize(("function", "scores"), [("none", [2, 1]), ("sigmoid", [0.8808, 0.7311])])
async def test_other_scores_on_request(build: Build, function: Any, scores: list[float]) -> None:
    classifier, _, _ = build(Replicas(ANSWER))
    [prediction] = await classifier.classify(["a"], ClassifyParameters(function_to_apply=function, top_k=2))
    assert prediction.labels == ["y", "z"]
    assert prediction.scores == pytest.approx(scores, abs=1e-4)


async def test_a_lost_replica_costs_a_retry_and_no_deadline(build: Build) -> None:
    replicas = Replicas(ReplicaLostError(), NoRuntimeError(4, 0), ANSWER)
    classifier, recorder, _ = build(replicas)
    await classifier.classify(["a"], ClassifyParameters(slo_ms=10))
    assert [query.budget_s is None for query in replicas.queries] == [False, True, True]
    assert recorder.events[1:] == ["lost", ("answered", 8, 3, False)]
    assert recorder.ends == [Outcome.OK]


async def test_a_text_that_kills_replicas_is_given_up(build: Build) -> None:
    replicas = Replicas(ReplicaLostError())
    classifier, _, _ = build(replicas)
    with pytest.raises(RequestError, match="3 replicas of topics died") as error:
        await classifier.classify(["a"], ClassifyParameters())
    assert error.value.outcome == Outcome.UNAVAILABLE
    assert len(replicas.queries) == 3


async def test_no_replica_at_all_is_an_end_in_time(build: Build) -> None:
    classifier, recorder, _ = build(Replicas(NoRuntimeError(4, 0)), timeout_s=0.2, slo_ms=100)
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"answered within 0\.2 s") as error:
        await classifier.classify(["a"], ClassifyParameters())
    assert error.value.outcome == Outcome.UNAVAILABLE
    assert time.monotonic() - started == pytest.approx(0.2)
    assert recorder.events == [("arrived", 3)]
    assert recorder.ends == [Outcome.UNAVAILABLE]


async def test_a_refusal_teaches_the_table_and_is_tried_again(build: Build) -> None:
    classifier, recorder, table = build(Replicas(Refusal("length", "r", REPORT), ANSWER))
    table.sync({"r": None})
    await classifier.classify(["a"], ClassifyParameters())
    assert table.replicas()["r"]["max_length"] == 4
    assert recorder.events[1] == "moved"


@pytest.mark.parametrize(
    ("reply", "outcome", "retry_after_s", "reason"),
    [
        (DeadlineError(2.5, 0.1), Outcome.SHED, 2.5, "too busy"),
        (DeadlineError(float("inf"), 0.1), Outcome.SHED, 0.1, "too busy"),
        (DeadlineError(float("inf"), 60), Outcome.TOO_LATE, 1, "even when idle: this text takes about 60000.0 ms"),
        (Refusal("busy", "r", REPORT, 0.01), Outcome.SHED, 0.01, "too busy"),
    ],
)
async def test_what_cannot_be_in_time_is_refused_with_a_time_to_come_back(
    build: Build, reply: Reply, outcome: Outcome, retry_after_s: float, reason: str
) -> None:
    classifier, recorder, _ = build(Replicas(reply))
    with pytest.raises(RequestError, match=reason) as error:
        await classifier.classify(["a", "b"], ClassifyParameters())
    assert (error.value.outcome, error.value.retry_after_s) == (outcome, retry_after_s)
    assert error.value.fault == (Fault.SHORT_SLO if outcome == Outcome.TOO_LATE else None)
    assert outcome in recorder.ends


async def test_what_is_too_long_is_rejected_with_the_limit(build: Build) -> None:
    classifier, recorder, _ = build(Replicas(ANSWER))
    for text in ("a " * 7, "a" * 10_000):
        with pytest.raises(RequestError, match="takes at most 8") as error:
            await classifier.classify([text], ClassifyParameters())
        assert error.value.fault == Fault.TOO_LONG
    assert recorder.ends == [Outcome.REJECTED] * 2
    assert not recorder.events


async def test_too_long_is_cut_with_a_warning_where_the_operator_says_so(build: Build) -> None:
    replicas = Replicas(ANSWER)
    classifier, _, _ = build(replicas, truncate=True)
    short, cut, long = await classifier.classify(["a", "a " * 7, "a " * 5_000], ClassifyParameters())
    assert short.warning is None
    assert cut.warning == "text cut to the first 8 of 9 tokens"
    assert long.warning is not None
    assert long.warning.startswith("text cut to the first 8 of more than")
    ids = [np.frombuffer(query.ids, "<i4").tolist() for query in replicas.queries]
    assert sorted(ids) == sorted([[2, 4, 3], [2, 4, 4, 4, 4, 4, 4, 3], [2, 4, 4, 4, 4, 4, 4, 3]])


async def test_leaving_cancels_every_text(build: Build) -> None:
    never = asyncio.Event()
    started = 0

    async def call(_query: Query) -> Answer:
        nonlocal started
        started += 1
        try:
            await never.wait()
        finally:
            started -= 1
        return ANSWER

    classifier, recorder, _ = build(call)
    task = asyncio.create_task(classifier.classify(["a"] * 5, ClassifyParameters()))
    await asyncio.sleep(0.01)
    assert started == 5
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert started == 0
    assert recorder.events == [("arrived", 3)] * 5
    assert recorder.ends == [Outcome.CANCELLED] * 5


async def test_what_nobody_expects_is_counted_and_raised(build: Build) -> None:
    classifier, recorder, _ = build(Replicas(ValueError("what")))
    with pytest.raises(ValueError, match="what"):
        await classifier.classify(["a"], ClassifyParameters())
    assert recorder.ends == [Outcome.FAILED]


async def test_who_can_do_without_an_answer_waits_neither_for_replicas_nor_too_long(build: Build) -> None:
    for gone in (NoRuntimeError(4, 0), NotDeployedError()):
        classifier, recorder, _ = build(Replicas(gone))
        with pytest.raises(RequestError, match="no replica of topics takes 3 tokens now") as error:
            await classifier.read("a", 1.0, within_s=60)
        assert error.value.fault == Fault.DOWN
        assert recorder.ends == [Outcome.UNAVAILABLE]

    async def never(_query: Query) -> Answer:
        await asyncio.Event().wait()
        return ANSWER

    classifier, recorder, _ = build(never)
    with pytest.raises(RequestError, match=r"no replica of topics answered within 0\.02 s") as error:
        await classifier.read("a", 1.0, within_s=0.02)
    assert error.value.fault == Fault.TIMED_OUT
    assert recorder.ends == [Outcome.UNAVAILABLE]
    hopeless, _, _ = build(Replicas(DeadlineError(float("inf"), 60)))
    with pytest.raises(RequestError, match="even when idle") as error:
        await hopeless.read("a", 1.0)
    assert (error.value.outcome, error.value.fault) == (Outcome.TOO_LATE, Fault.SHORT_SLO)


async def test_a_reading_tells_what_a_cascade_asks_for(build: Build) -> None:
    told = Answer(LOGITS.tobytes(), 8, 8, np.arange(4, dtype=np.float32).tobytes(), 0.125)
    replicas = Replicas(told, ReplicaLostError(), ANSWER)
    classifier, recorder, table = build(replicas)
    reading = await classifier.read("a b", 0.5, 0.25, Telling(1.5, 0.9))
    assert reading.logits.tolist() == LOGITS.tolist()
    assert reading.importance is not None
    assert reading.importance.tolist() == [0, 1, 2, 3]
    assert reading.telling_s == 0.125
    assert len(reading.encoding) == 4
    assert not reading.interrupted
    again = await classifier.read("a", None)
    assert again.importance is None
    assert again.interrupted
    first, second, _ = replicas.queries
    assert first.telling == (1.5, 0.9)
    assert first.budget_s is not None
    assert 0.4 < first.budget_s <= 0.5
    assert first.utility == 0.25
    assert second.telling is None
    assert second.budget_s is None
    assert [event[0] for event in recorder.events if isinstance(event, tuple)] == ["arrived", "answered"] * 2
    assert classifier.down
    table.sync({"r": REPORT})
    assert not classifier.down
    assert not classifier.ready


async def test_only_cascades_have_details(build: Build) -> None:
    classifier, _, _ = build(Replicas(ANSWER))
    with pytest.raises(RequestError, match=r"parameters\.details: topics is no cascade") as error:
        await classifier.classify(["a"], ClassifyParameters(details=True))
    assert error.value.outcome == Outcome.REJECTED
