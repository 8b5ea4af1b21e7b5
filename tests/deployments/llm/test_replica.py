"""What a language model's replica makes of its engine's errors, without Ray and without a model."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from support.decoders import save
from support.lora_adapters import adapt
from support.scripted_executor import ScriptedExecutor, byte_tokenizer
from support.waiting import HANGS_AFTER_S

from pliant.config.llm import LlmConfig
from pliant.deployments.llm.adapter_loader import AdapterLoadError, AdapterTooLargeError
from pliant.deployments.llm.assembly import assemble
from pliant.deployments.llm.engine import BrokenError, Engine, TooLongError
from pliant.deployments.llm.guide import GuideError
from pliant.deployments.llm.loop import StandstillError
from pliant.deployments.llm.messages import ReplicaReport
from pliant.deployments.llm.metrics import LlmReplicaMetrics
from pliant.deployments.llm.precedence import Precedence
from pliant.deployments.llm.replica import LlmReplica, in_thread_that_ends
from pliant.deployments.llm.report import AdapterReport, ClassReport, MemoryReport
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving import metrics
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.serving.replica import Held
from pliant.errors import ModelError
from pliant.formats.adapter_info import read_adapter
from pliant.models import sources
from pliant.policies.llm.decode_admission import LateError
from pliant.sampling import Sampling

PARCEL = Parcel("r", "gateway", (Generation("g", (1, 2, 3), 7, Sampling()),))
PIECE = Piece((5,), "a")


class Loop:
    """An engine's loop that yields a sign of life and a piece, and then raises, or goes on for ever."""

    failure: Exception | None = None
    seconds = load_s = 0.0
    closed = False

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def generate(self, _generation: Generation) -> AsyncGenerator[Piece | None, None]:
        try:
            yield None
            yield PIECE
            if self._error:
                raise self._error
            await asyncio.Event().wait()
        finally:
            self.closed = True

    def stepping_s(self) -> float:
        return self.seconds

    def loading_s(self) -> float:
        return self.load_s

    def close(self) -> None: ...


def replica(loop: Loop) -> Any:
    made: Any = LlmReplica.__new__(LlmReplica)
    made._service, made._held, made._loop, made._hangs_after_s = "chat", Held(), loop, 60
    made._precedence = Precedence(loop.generate)
    return made


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (LateError("too late", 2.5), Refusal("busy", "too late", 2.5)),
        (TooLongError("too long"), Refusal("final", "too long", None, Outcome.REJECTED, Fault.CONTEXT_LENGTH)),
        (GuideError("no grammar"), Refusal("final", "no grammar", None, Outcome.REJECTED)),
        (ValueError("no sense"), Refusal("final", "no sense", None, Outcome.REJECTED)),
        (
            AdapterLoadError("no weights"),
            Refusal("unable", "no weights", None, Outcome.UNAVAILABLE, Fault.ADAPTER_NOT_LOADABLE),
        ),
        (
            AdapterTooLargeError("no room"),
            Refusal("unable", "no room", None, Outcome.REJECTED, Fault.ADAPTER_TOO_LARGE),
        ),
        (BrokenError("no memory"), Refusal("failed", "no memory")),
        (StandstillError("60 s"), Refusal("failed", "60 s")),
    ],
)
async def test_errors_are_told_in_plain_data(error: Exception, last: Refusal) -> None:
    made = replica(Loop(error))
    assert [item async for item in made.generate(PARCEL)] == [Alive(), PIECE, last]
    assert made._held.amounts() == {}


async def test_live_tokens_are_held_until_the_gateway_leaves() -> None:
    loop = Loop()
    made = replica(loop)
    answers = [made.generate(PARCEL), made.generate(PARCEL._replace(gateway="another"))]
    for answer in answers:
        assert await anext(answer) == Alive()
        assert await anext(answer) == PIECE
    assert made._held.amounts() == {"gateway": 10, "another": 10}
    await answers[0].aclose()
    assert made._held.amounts() == {"another": 10}
    assert loop.closed
    await answers[1].aclose()
    assert made._held.amounts() == {}


async def test_health() -> None:
    loop = Loop()
    made = replica(loop)
    await made.check_health()
    loop.seconds = 61
    with pytest.raises(RuntimeError, match="one step has taken 61 s"):
        await made.check_health()
    loop.seconds, loop.load_s = 0.0, 62
    with pytest.raises(RuntimeError, match="one load of an adapter has taken 62 s"):
        await made.check_health()
    loop.failure = BrokenError("no memory")
    with pytest.raises(BrokenError, match="no memory"):
        await made.check_health()


class Recorded:
    """In the place of a metric of Ray: what it was told, by the values of the tags."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values[tuple((tags or {}).values())] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        key = tuple(tags.values())
        self.values[key] = self.values.get(key, 0.0) + value


def test_counts_that_replicas_report_become_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Recorded] = defaultdict(Recorded)

    def declare(_service: str, name: str, _description: str, *_tags: str) -> Recorded:
        return recorded[name]

    monkeypatch.setattr(metrics, "counter", declare)
    monkeypatch.setattr(metrics, "gauge", declare)
    made = LlmReplicaMetrics("chat")
    engine = Engine(ScriptedExecutor(), byte_tokenizer(), (), 10, 0.05)
    report = ReplicaReport(**{**engine.report(), "version": 0, "held": {"gateway": 7.0}})  # type: ignore[typeddict-unknown-key]
    adapters: AdapterReport = {**report["adapters"], "resident": ["p", "q"], "hits": 3, "evictions": {"memory": 2}}
    memory: MemoryReport = {**report["memory"], "live": 2, "idle": 1, "hit": 30, "missed": 10}
    small: ClassReport = {"cut_off": 0.2, "quota": 10, "waiting": 4, "admitted": 5, "waited_s": 0.5}
    fewer: ClassReport = {**small, "waiting": 1, "admitted": 6}
    made.record({**report, "memory": memory, "adapters": adapters, "classes": [small, small], "squashed": 1})
    made.record({**report, "memory": memory, "adapters": {**adapters, "hits": 5}, "classes": [fewer], "squashed": 1})
    evictions = {"memory": 3, "unused": 1}
    made.record(
        {**report, "memory": memory, "adapters": {**adapters, "hits": 1, "evictions": evictions}, "classes": [fewer]}
    )
    values = {name: one.values for name, one in recorded.items() if any(one.values.values())}
    assert values == {
        "pliant_llm_live_tokens": {(): 7},
        "pliant_llm_prefix_tokens_total": {("hit",): 30, ("miss",): 10},
        "pliant_llm_pages": {("live",): 2, ("idle",): 1},
        "pliant_adapter_cache_hits_total": {(): 3 + 2 + 1},  # it began again
        "pliant_adapter_cache_evictions_total": {("memory",): 3, ("unused",): 1},
        "pliant_adapters_resident": {(): 2},
        "pliant_queue_requests_waiting": {("0",): 1, ("1",): 0},  # that queue is no more
        "pliant_queue_requests_admitted_total": {("0",): 6, ("1",): 5},
        "pliant_queue_wait_seconds_total": {("0",): 0.5, ("1",): 0.5},
        "pliant_requests_squashed_total": {(): 1},
    }


def configured(tmp_path: Path, **options: Any) -> LlmConfig:
    """A tiny decoder with two adapters."""
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    save("llama3", model)
    byte_tokenizer().save(str(model / "tokenizer.json"))
    for number, kind in enumerate(("rank-8", "patterns")):
        adapt("llama3", kind, adapters / kind, seed=number)
    shutil.copytree(adapters / "rank-8", adapters / "broken")
    (adapters / "broken" / "adapter_model.safetensors").unlink()
    given = {"folder": str(adapters), "pinned": ("patterns", "broken"), "host_mb": 1}
    return LlmConfig(
        kind="llm", model=str(model), slots=4, max_length=64, memory_mb=2, debug=True, adapters=given, **options
    )


@pytest.mark.parametrize("scheduler", ["multi_queue", "fifo", "sjf"])
def test_an_engine_is_what_the_config_says(tmp_path: Path, scheduler: str, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(tmp_path, scheduler=scheduler)
    engine = assemble(config)
    assert engine.report()["adapters"]["resident"] == ["patterns"]
    assert "adapter broken cannot be pinned" in caplog.text
    shape = sources.describe_decoder(Path(config.model)).shape
    assert config.adapters
    assert config.adapters.folder
    wanted = read_adapter(Path(config.adapters.folder, "rank-8"), shape).ref("rank-8")
    for number in range(6):
        engine.add(
            Generation(str(number), (1, 2, 3), 5, Sampling(temperature=0), adapter=wanted if number % 2 else None)
        )
    answers: dict[str, tuple[int, ...]] = defaultdict(tuple)
    while engine.busy:
        for name, item in engine.step():
            assert isinstance(item, Piece), item
            answers[name] += item.tokens
    assert set(map(len, answers.values())) == {5}
    assert len(set(answers.values())) == 2
    assert engine.report()["adapters"]["host_bytes"] > 0
    stale = wanted._replace(revision="another")
    engine.add(Generation("stale", (1, 2, 3), 5, Sampling(), adapter=stale))
    items = [item for _ in range(1000) if engine.busy for item in engine.step()]
    assert [(name, type(item)) for name, item in items] == [("stale", AdapterLoadError)]
    assert "has changed since it was registered; load the adapter again" in str(items[0][1])
    engine.close()


async def test_an_engine_is_made_in_a_thread_that_ends() -> None:
    """So that the engine's own thread gets what torch keeps by thread."""
    made_in = await in_thread_that_ends(threading.current_thread)
    await asyncio.to_thread(made_in.join, HANGS_AFTER_S)
    assert not made_in.is_alive()
    with pytest.raises(ModelError):
        await in_thread_that_ends(fails)


def fails() -> None:
    raise ModelError("no model")
