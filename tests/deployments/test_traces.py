"""Traces of requests to services of all kinds, by the tracing of which nobody notices anything."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import APIRouter
from support.echo.config import EchoConfig
from support.echo.kind import ECHO
from support.local_serve import LocalCluster
from support.scripted import Replica, Replicas, ids, language_model
from support.scripted_replicas import ANSWERS, Act
from support.scripted_vision import INFO, service
from support.spans import collected
from support.tenants import keyed
from support.text_service import TextService, save_tokenizer
from typer.testing import CliRunner

from pliant import traces
from pliant.cli import command
from pliant.config.cluster import Reader
from pliant.deployments.http.background import Background
from pliant.deployments.http.parameters import ClassifyParameters, VisionParameters
from pliant.deployments.kinds import CONFIGS, KINDS, loaded
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.llm.spans import steps
from pliant.deployments.serving import tracing
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.replica import Desk
from pliant.deployments.serving.way import follow
from pliant.sampling import Sampling

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
async def http() -> AsyncIterator[Callable[[], Awaitable[httpx.AsyncClient]]]:
    """Makes a client of a gateway of a toy kind, which is traced if there are traces by then."""
    clients: list[httpx.AsyncClient] = []

    async def made() -> httpx.AsyncClient:
        config = Reader((*CONFIGS, EchoConfig)).parse({"services": {"echo": {"kind": "echo", "replicas": 1}}})
        app = await LocalCluster(config, loaded((*KINDS, ECHO))).gateway()
        clients.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test"))
        return clients[-1]

    yield made
    for each in clients:
        await each.aclose()


async def test_a_request_goes_on_with_its_client_s_trace(http: Any) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    with collected() as spans:
        client = await http()
        assert (await client.post("/models/echo", json={"inputs": ["a", "b"]}, headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code < 500
        [request] = spans.named("POST /models/{model}")
        children = [*spans.named("attempt"), *spans.named("choose")]
    assert request.context
    assert request.parent
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert request.attributes
    assert (request.attributes["pliant.request_id"], request.attributes["http.response.status_code"]) == ("mine", 200)
    assert len(children) == 4
    assert {child.parent and child.parent.span_id for child in children} == {request.context.span_id}


async def test_what_replicas_do_is_below_the_attempt_that_asked_them(http: Any) -> None:
    with collected() as spans:
        client = await http()
        assert (await client.post("/models/echo", json={"inputs": ["a", "b"]})).status_code == 200
        attempts, replicas = spans.named("attempt"), spans.named("replica")
        parts = [*spans.named("queue"), *spans.named("compute")]
    assert {span.parent and span.parent.span_id for span in replicas} == {span.context.span_id for span in attempts}
    for replica in replicas:
        assert replica.attributes == {"pliant.subject": "echo"}
        first, second = (part for part in parts if part.parent and part.parent.span_id == replica.context.span_id)
        assert (first.start_time, first.end_time) <= (second.start_time, second.end_time)


async def test_queue_and_compute_share_the_time_and_what_breaks_down_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def engine(query: float) -> float:
        return 1 / query

    seconds = iter((10, 13, 13, 20))
    monkeypatch.setattr(tracing, "time", SimpleNamespace(time_ns=lambda: next(seconds) * 10**9))
    desk = Desk("topics", engine, compute_s=lambda _answer: 1.0)
    trace = f"00-{TRACE}-{PARENT}-01"
    with collected() as spans:
        assert isinstance(await desk.one(Parcel("r", "g", (1.0,), ("mine",), (trace,))), float)
        assert isinstance(await desk.one(Parcel("r", "g", (0.0,), ("mine",), (trace,))), Refusal)
        await desk.one(Parcel("r", "g", (1.0,)))
        [queue], [compute] = spans.named("queue"), spans.named("compute")
        assert len(spans.named("replica")) == 2
    assert (queue.start_time, queue.end_time) == (10 * 10**9, 12 * 10**9)
    assert (compute.start_time, compute.end_time) == (12 * 10**9, 13 * 10**9)


async def test_an_answer_waits_then_its_prompt_is_computed_and_then_its_steps_are_summed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter((10, 15, 15, 20))
    clock = SimpleNamespace(time_ns=lambda: next(seconds) * 10**9, monotonic=time.monotonic)
    monkeypatch.setattr(tracing, "time", clock)
    with collected() as spans:
        with steps("chat", f"00-{TRACE}-{PARENT}-01") as noted:
            assert noted
            noted.gave(Piece((1,), "", prompt_s=3.0))
            for tokens in ((2, 3), (4,)):
                noted.gave(Piece(tokens, ""))
        with steps("chat", "") as noted:
            assert noted is None
        [queue], [prompt] = spans.named("queue"), spans.named("prompt")
        [rest], [replica] = spans.named("steps"), spans.named("replica")
    parts = [(part.start_time, part.end_time) for part in (queue, prompt, rest)]
    assert parts == [(10 * 10**9, 12 * 10**9), (12 * 10**9, 15 * 10**9), (15 * 10**9, 20 * 10**9)]
    assert rest.parent
    assert replica.context
    assert rest.parent.span_id == replica.context.span_id
    assert rest.attributes
    assert (rest.attributes["pliant.steps"], rest.attributes["pliant.tokens"]) == (2, 3)


async def test_a_trace_that_is_not_sampled_stays_so(http: Any) -> None:
    with collected() as spans:
        client = await http()
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert (await client.post("/models/echo", json={"inputs": "a"}, headers=headers)).status_code == 200
        assert spans.attempts() == spans.named("replica") == []


async def test_without_traces_no_span_is_made(http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise AssertionError("a span")

    monkeypatch.setattr(tracing.Trial, "__init__", none)
    monkeypatch.setattr(tracing.Work, "__init__", none)
    monkeypatch.setattr("pliant.deployments.http.tracing.Tracing.__init__", none)
    assert (await (await http()).post("/models/echo", json={"inputs": "a"})).status_code == 200


async def test_without_traces_the_way_of_a_request_is_told_to_whoever_asks(http: Any) -> None:
    client = await http()
    answers = [
        await client.post("/models/echo", json={"inputs": "a"}, headers=headers)
        for headers in ({}, {"x-pliant-timing": "true"}, {})
    ]
    before, asked, after = (answer.headers.get("server-timing") for answer in answers)
    assert re.fullmatch(r'choose;dur=[\d.]+, attempt;dur=[\d.]+;desc="echo-\d of echo answered"', asked or "")
    assert before is after is None


async def ask_encoder(folder: Path) -> None:
    service = TextService(save_tokenizer(folder), {"r": [Act(dies=True)], "s": [ANSWERS]})
    await service.classifier.classify(["a b"], ClassifyParameters())


async def ask_vision(_folder: Path) -> None:
    vision, _, _ = service()
    await vision.classify([np.zeros((INFO.height, INFO.width, 3), dtype=np.uint8)], VisionParameters())


async def ask_llm(folder: Path) -> None:
    model = language_model(folder, Replicas(a=Replica(dies_after=7), b=Replica()))
    async for _ in model.answer(Generation("g", ids("hello"), 20, Sampling(temperature=0))):
        pass


SAYS: dict[str, tuple[Callable[[Path], Awaitable[None]], dict[str, Any]]] = {
    "encoder": (ask_encoder, {"pliant.tokens": 4, "pliant.runtime": 8, "pliant.computed_tokens": 8}),
    "vision": (ask_vision, {"pliant.gamma": -4, "pliant.fate": "in_time"}),
    "llm": (
        ask_llm,
        {"gen_ai.request.max_tokens": 20, "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 20},
    ),
}


@pytest.mark.virtual_time
@pytest.mark.parametrize("kind", SAYS)
async def test_an_attempt_says_what_its_kind_knows_of_the_answer(kind: str, tmp_path: Path) -> None:
    asks, says = SAYS[kind]
    with collected() as spans:
        await asks(tmp_path)
        *_, last = spans.attempts()
    assert last["pliant.outcome"] == "answered"
    assert says.items() <= last.items()


@pytest.mark.virtual_time
async def test_the_first_piece_of_each_replica_is_an_event(tmp_path: Path) -> None:
    with collected() as spans:
        await ask_llm(tmp_path)
        events = [[event.name for event in span.events] for span in spans.named("attempt")]
    assert events == [["first piece"], ["first piece"]]


@pytest.mark.virtual_time
async def test_the_way_of_an_answer_names_each_replica_that_was_asked(tmp_path: Path) -> None:
    steps = follow()
    await ask_llm(tmp_path)
    assert [step.name for step in steps] == ["choose", "first", "queue", "prompt", "attempt"] * 2
    lost, answered = (step.about for step in steps if step.name == "attempt")
    assert "lost; reason" in lost
    assert answered.endswith("output_tokens 20")


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_an_exporter_that_is_missing_is_named(
    environment: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(traces.importlib.util, "find_spec", lambda _name: None)  # type: ignore[attr-defined]
    told = CliRunner().invoke(command.app, ["check", "cluster.yaml"]).output
    tracing.start()
    assert tracing.tracer is None
    assert [("pliant[traces]" in text) for text in (told, caplog.text)] == [wanted, wanted]


async def test_what_a_batch_asks_is_one_trace_each() -> None:
    api = APIRouter()

    @api.post("/v1/completions")
    async def answers() -> None:
        if each := tracing.trial("chat", "a", None, lambda _: {}):
            each.over("said")

    with collected() as spans:
        background = Background([api], keyed(()))
        tenant = next(iter(keyed(()).accounts))
        assert (await background.ask(tenant, "line-1", "/v1/completions", {})).status == 200
        [request], [attempt] = spans.named("POST /v1/completions"), spans.named("attempt")
    assert request.parent is None
    assert request.context
    assert attempt.parent
    assert attempt.parent.span_id == request.context.span_id
