"""A stream that broke off goes on with the part that was not delivered, or says that it cannot."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from support.scripted import Replica, Replicas, language_model

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.resumption import Delivered, rest
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.request import Piece, merged
from pliant.deployments.serving.outcome import Fault, RequestError
from pliant.deployments.serving.services import Services

pytestmark = pytest.mark.virtual_time

COMPLETION: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 9}
CHAT: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "y"}], "max_tokens": 9}
MINE = {"x-request-id": "mine"}


class Event(NamedTuple):
    id: str | None
    data: Any


def gateway(folder: Path, **options: Any) -> TestClient:
    """Two of them would not be different: none keeps anything of a stream."""
    services = Services.of("prompts", {"chat": language_model(folder, Replicas(a=Replica(**options)))})
    config = GatewayConfig()
    return TestClient(application(config, services, dict, bytes, LlmKind().routers(services, None, config)))


@pytest.fixture
def http(tmp_path: Path) -> TestClient:
    return gateway(tmp_path)


def path(body: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in body else "/v1/chat/completions"


def streamed(http: TestClient, body: dict[str, Any], **headers: str) -> list[Event]:
    answer = http.post(path(body), json={**body, "stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    *events, end = answer.text.split("\n\n")
    assert not end
    return [event(each) for each in events]


def event(text: str) -> Event:
    fields = dict(line.split(": ", 1) for line in text.split("\n"))
    data = fields["data"]
    return Event(fields.get("id"), data if data == "[DONE]" else json.loads(data))


def text(events: list[Event]) -> str:
    choices = [each.data["choices"][0] for each in events if each.data != "[DONE]" and each.data["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 7}, {}], ids=["greedy", "seed", "request id"])
def test_a_stream_goes_on_after_any_event(http: TestClient, body: dict[str, Any], sampling: dict[str, Any]) -> None:
    body = {**body, **sampling}
    whole = streamed(http, body, **MINE)
    assert len(text(whole)) == 9
    for index, (id, _) in enumerate(whole[:-1]):
        assert id
        later = streamed(http, body, **MINE, **{"Last-Event-ID": id})
        assert text(whole[: index + 1]) + text(later) == text(whole)
        assert later[-1].data == "[DONE]"
        assert later[0].data["id"] == whole[0].data["id"]
        assert later[0].data["choices"][0]["delta"].get("role") is None if "messages" in body else True


def test_what_counts_goes_on_too(tmp_path: Path) -> None:
    http = gateway(tmp_path, cached=2)
    body = {**COMPLETION, "temperature": 0, "logprobs": 1, "stream_options": {"include_usage": True}}
    whole = streamed(http, body)
    later = streamed(http, body, **{"Last-Event-ID": whole[3].id or ""})
    assert later[-2].data["usage"] == whole[-2].data["usage"]
    assert whole[-2].data["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [each.data["choices"] for each in later[:-2]] == [each.data["choices"] for each in whole[4:-2]]


def test_the_same_request_id_gives_the_same_answer(http: TestClient) -> None:
    first, again, other = (http.post("/v1/completions", json=COMPLETION, headers=id).json() for id in (MINE, MINE, {}))
    assert (first["id"], first["choices"]) == (again["id"], again["choices"])
    assert first["id"] != other["id"]


@pytest.mark.parametrize(
    ("id", "changes", "status", "reason"),
    [
        ("3.3.00000000", {}, 409, "the answer is another one"),
        ("99.99.00000000", {}, 409, "the answer is another one"),
        ("7", {}, 400, "not the id of an event"),
        ("1.1.00000000", {"n": 2}, 400, "only streams of one"),
    ],
)
def test_it_says_when_it_cannot_go_on(
    http: TestClient, id: str, changes: dict[str, Any], status: int, reason: str
) -> None:
    body = {**COMPLETION, "temperature": 0, "stream": True, **changes}
    answer = http.post("/v1/completions", json=body, headers={"Last-Event-ID": id})
    assert answer.status_code == status
    assert reason in answer.json()["error"]["message"]


def test_another_prompt_is_another_answer(http: TestClient) -> None:
    id = streamed(http, {**COMPLETION, "temperature": 0})[4].id
    body = {**COMPLETION, "temperature": 0, "prompt": "other", "stream": True}
    assert http.post("/v1/completions", json=body, headers={"Last-Event-ID": id or ""}).status_code == 409


def test_several_answers_have_no_ids(http: TestClient) -> None:
    assert {each.id for each in streamed(http, {**COMPLETION, "n": 2})} == {None}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Piece], list[Piece]]:
    """One answer in pieces, as it came twice: text is behind its tokens alike."""
    lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    steps = [Piece((index,), "äbc"[:length]) for index, length in enumerate(lengths)]
    ways = [draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps))) for _ in range(2)]
    first, second = (_grouped(steps, way) for way in ways)
    return first, second


def _grouped(steps: list[Piece], ends: list[bool]) -> list[Piece]:
    groups: list[list[Piece]] = [[]]
    for step, end in zip(steps, ends, strict=True):
        groups[-1].append(step)
        if end:
            groups.append([])
    pieces = [merged(group) for group in groups if group]
    return [*pieces[:-1], pieces[-1]._replace(finish="stop")]


async def came(pieces: list[Piece]) -> AsyncGenerator[tuple[int, Piece], None]:
    for piece in pieces:
        yield 0, piece


@given(cuts(), st.integers(0, 12))
async def test_however_it_is_cut(answer: tuple[list[Piece], list[Piece]], had: int) -> None:
    first, second = answer
    delivered = Delivered()
    for piece in first[:had]:
        delivered = delivered.and_also(piece)
    skipped: list[Piece] = []
    later = [piece async for _, piece in rest(came(second), delivered, skipped.append)]
    for field in ("tokens", "text"):
        parts = [getattr(piece, field) for piece in (*first[:had], *later)]
        whole = [getattr(piece, field) for piece in first]
        empty = parts[0][:0]
        assert sum(parts, empty) == sum(whole, empty) if field == "tokens" else "".join(parts) == "".join(whole)
    assert later[-1].finish == "stop"


async def test_an_answer_that_ends_sooner_is_another_one() -> None:
    with pytest.raises(RequestError) as error:
        [piece async for piece in rest(came([Piece((1,), "a", None, "stop")]), Delivered(2, 2, 7), list)]
    assert error.value.fault == Fault.CONFLICT
