"""OpenAI's endpoints with the real client over scripted replicas: shapes, streams, limits, and errors that say why."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openai.types import Completion
from support.scripted import TOKENIZER, Replica, Replicas, ids, language_model, said
from support.tenants import keyed
from tokenizers import Tokenizer, decoders, models

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.chat_template import ChatTemplate
from pliant.deployments.http.openai_answers import CompletionShape
from pliant.deployments.http.statuses import speaks_openai
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.request import Generation, Piece, TokenLogprobs
from pliant.deployments.llm.token_texts import TokenTexts
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.services import Services
from pliant.errors import ModelError
from pliant.sampling import Sampling

pytestmark = pytest.mark.virtual_time

GREEDY: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 12, "temperature": 0}
MESSAGES: Any = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
TALK: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
CHAT_PROMPT = "s:x</s>u:y</s>a:"
BUSY = Refusal("busy", "too late", 7)

Served = tuple[openai.AsyncOpenAI, Replicas]


def greedy(prompt: str, max_tokens: int = 12) -> str:
    return said(Generation("", ids(prompt), max_tokens, Sampling(temperature=0)))


def gateway(folder: Path, replicas: Replicas, keys: Collection[str] = (), **options: Any) -> FastAPI:
    models = {"chat": language_model(folder, replicas, **options)}
    config, services = GatewayConfig(max_body_mb=0.02), Services.of("prompts", models)
    return application(config, services, dict, bytes, LlmKind().routers(services, None, config), keyed(keys))


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Served]:
    def serve(replicas: Replicas | None = None, **options: Any) -> Served:
        replicas = replicas or Replicas(a=Replica())
        transport = httpx.ASGITransport(gateway(tmp_path, replicas, **options))
        http = httpx.AsyncClient(transport=transport)
        client = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)
        return client, replicas

    return serve


@pytest.fixture
def http(tmp_path: Path) -> TestClient:
    return TestClient(gateway(tmp_path, Replicas(a=Replica())))


Serve = Callable[..., Served]


async def test_a_completion(serve: Serve) -> None:
    client, _ = serve()
    answer = await client.completions.create(**GREEDY)
    assert answer.choices[0].text == greedy("hello")
    assert (answer.choices[0].finish_reason, answer.choices[0].logprobs) == ("length", None)
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)
    assert (answer.object, answer.model) == ("text_completion", "chat")
    assert answer.id.startswith("cmpl-")
    assert (answer.system_fingerprint or "").startswith("fp_")
    assert (await client.completions.create(**GREEDY)).id != answer.id


async def test_a_chat(serve: Serve) -> None:
    client, _ = serve()
    answer = await client.chat.completions.create(**TALK)
    message = answer.choices[0].message
    prompt = TOKENIZER.encode(CHAT_PROMPT).ids
    expected = said(Generation("", tuple(prompt), 12, Sampling(temperature=0)))
    assert (message.role, message.content, message.refusal) == ("assistant", expected, None)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage
    assert answer.usage.prompt_tokens == len(prompt)


async def test_streams_say_the_same(serve: Serve) -> None:
    client, _ = serve()
    text = ""
    async for chunk in await client.completions.create(**GREEDY, stream=True):
        assert chunk.usage is None
        text += chunk.choices[0].text
    assert (text, chunk.choices[0].finish_reason) == (greedy("hello"), "length")
    whole = await client.chat.completions.create(**TALK)
    chunks = [chunk async for chunk in await client.chat.completions.create(**TALK, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 12 + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_of_a_stream(serve: Serve) -> None:
    client, _ = serve()
    stream = await client.chat.completions.create(**TALK, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(TOKENIZER.encode(CHAT_PROMPT).ids), 12)


@pytest.mark.parametrize("streamed", [False, True])
async def test_usage_tells_what_was_cached_of_each_prompt(serve: Serve, streamed: bool) -> None:
    """That is what no choice of it had computed."""

    async def cached(client: openai.AsyncOpenAI, **body: Any) -> int | None:
        asked: Any = {**GREEDY, **body}
        if streamed:
            more: Any = {"stream": True, "stream_options": {"include_usage": True}}
            [*_, answer] = [chunk async for chunk in await client.completions.create(**asked, **more)]
        else:
            answer = await client.completions.create(**asked)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens_details.cached_tokens

    client, _ = serve(Replicas(a=Replica(cached=3)))
    assert await cached(client) == 3
    assert await cached(client, n=4, prompt=["hello", "other"]) == 6
    first = Piece(ids("a"), "a", None, "stop", cached=2)
    client, replicas = serve(Replicas(a=Replica(gives=[first])))
    assert await cached(client) == 2
    replicas.start("b", Replica(gives=[first._replace(cached=None)]))  # of a version that does not say
    assert await cached(client) == 0


async def test_one_choice_that_found_less_counts(serve: Serve) -> None:
    client, _ = serve(Replicas(a=Replica(cached=4), b=Replica(cached=1)))
    answer = await client.completions.create(**GREEDY, n=2)
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize(("dies_after", "cached"), [(0, 4), (5, 2)])
async def test_whoever_said_first_what_was_cached_counts(serve: Serve, dies_after: int, cached: int) -> None:
    replicas = Replicas(a=Replica(cached=2, dies_after=dies_after))
    client, _ = serve(replicas)
    asked = asyncio.create_task(client.chat.completions.create(**TALK))
    await asyncio.sleep(0.1)
    assert replicas.replicas["a"].dead
    replicas.start("b", Replica(cached=4))
    usage = (await asked).usage
    assert usage
    assert usage.prompt_tokens_details
    assert (usage.prompt_tokens_details.cached_tokens, usage.completion_tokens) == (cached, 12)


def test_the_bytes_of_a_stream(http: TestClient) -> None:
    answer = http.post("/v1/completions", json={**GREEDY, "max_tokens": 1, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, done, end = answer.content.split(b"\n\n")
    first, id = first.split(b"\n")
    assert id.startswith(b"id: 1.1.")
    chunk = json.loads(first.removeprefix(b"data: "))
    assert chunk["choices"] == [{"index": 0, "text": greedy("hello", 1), "logprobs": None, "finish_reason": "length"}]
    assert "usage" not in chunk
    assert (done, end) == (b"data: [DONE]", b"")


async def test_several_prompts_and_choices(serve: Serve) -> None:
    client, replicas = serve()
    answer = await client.completions.create(**{**GREEDY, "prompt": ["one", "two"], "n": 2})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [greedy(text) for text in ("one", "one", "two", "two")]
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 48)
    texts = [""] * 4
    async for chunk in await client.completions.create(**{**GREEDY, "prompt": ["one", "two"], "n": 2}, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
    assert len({generation.id for generation in replicas.asked}) == 8


async def test_prompts_may_be_tokens(serve: Serve) -> None:
    client, _ = serve()
    one = await client.completions.create(**{**GREEDY, "prompt": list(ids("hello"))})
    two = await client.completions.create(**{**GREEDY, "prompt": [list(ids("one")), list(ids("two"))]})
    assert one.choices[0].text == greedy("hello")
    assert [choice.text for choice in two.choices] == [greedy("one"), greedy("two")]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(serve: Serve, stream: bool) -> None:
    client, _ = serve()
    answer = await client.completions.create(**{**GREEDY, "prompt": list(ids("hé"))}, echo=True, stream=stream)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hé" + greedy("hé")


async def test_seeds(serve: Serve) -> None:
    client, replicas = serve()

    async def texts(**options: Any) -> list[str]:
        answer = await client.completions.create(**{**GREEDY, "temperature": 1, **options})
        return [choice.text for choice in answer.choices]

    five, six = await texts(seed=5, n=2)
    assert await texts(seed=6) == [six]
    assert await texts(seed=5) == [five]
    assert five != six
    await texts(seed=-(2**63))
    await texts(n=2)
    await texts()
    drawn = [generation.sampling.seed for generation in replicas.asked][-3:]
    assert drawn[1] - drawn[0] == 1
    assert drawn[2] not in drawn[:2], "every request without a seed draws one"
    await texts(prompt=["a", "a"], n=2)
    assert len({generation.sampling.seed for generation in replicas.asked[-4:]}) == 4, "equal prompts, drawn apart"
    same = await texts(prompt=["a", "a"], seed=5)
    assert same[0] == same[1]


async def test_what_reaches_the_replica(serve: Serve) -> None:
    client, replicas = serve()
    extra = {"top_k": -1, "ignore_eos": True}
    await client.completions.create(**GREEDY, stop="a", top_p=0.5, logprobs=3, extra_body=extra)
    await client.chat.completions.create(model="chat", messages=MESSAGES, stop=["a", "b"], extra_body={"top_k": 7})
    first, second = replicas.asked
    assert first.sampling == Sampling(temperature=0, top_p=0.5, seed=first.sampling.seed, logprobs=3)
    assert (first.stop, first.ignore_eos, first.max_tokens) == (("a",), True, 12)
    assert second.sampling == Sampling(top_k=7, seed=second.sampling.seed), (
        "what the model's folder says is the default"
    )
    assert (second.stop, second.ignore_eos, second.max_tokens) == (("a", "b"), False, 8)
    extra = {
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [65],
        "bad_words": ["a", "bc"],
        "guided_regex": "a+",
    }
    await client.completions.create(
        **GREEDY, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"7": 3}, extra_body=extra
    )
    third = replicas.asked[-1]
    assert third.sampling == Sampling(
        temperature=0,
        seed=third.sampling.seed,
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((7, 3), (*ids("a"), -math.inf)),
        min_tokens=2,
    )
    assert (third.stop_token_ids, third.bad_words) == ((65,), (ids(" a"), ids("bc"), ids(" bc")))
    assert "a+" in (third.grammar or "")


async def test_without_max_tokens_an_answer_has_what_fits(serve: Serve) -> None:
    client, replicas = serve(max_tokens=None)
    await client.completions.create(model="chat", prompt="hello")
    assert replicas.asked[-1].max_tokens == 64 - 5


async def test_the_fingerprint_is_that_of_model_and_code(tmp_path: Path) -> None:
    replicas, prints = Replicas(a=Replica()), set()
    for weights in (b"a", b"b" * 100_000, b"c" * 100_000):
        (tmp_path / "model.safetensors").write_bytes(weights)
        prints |= {language_model(tmp_path, replicas).fingerprint for _ in range(2)}
    prints.add(language_model(tmp_path, replicas, dtype="bfloat16").fingerprint)
    assert len(prints) == 4


async def test_harmless_parameters_are_accepted(serve: Serve) -> None:
    client, _ = serve()
    harmless: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "n": 1,
        "service_tier": "auto",
        "modalities": ["text"],
        "logprobs": False,
        "extra_body": {"skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0},
    }
    assert (await client.chat.completions.create(**TALK, **harmless)).choices[0].message.content
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said_before: Any = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None}
    developer: Any = {"role": "developer", "content": parts, "name": "d"}
    assert await client.chat.completions.create(model="chat", messages=[developer, said_before])


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("chat/completions", {"response_format": {"type": "json"}}, "response_format.type"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"properties": {"b": {"items": {"type": "c"}}}}},
                }
            },
            "response_format.json_schema.schema.properties.b.items",
        ),
        ("chat/completions", {"guided_regex": "(a"}, "guided_regex"),
        ("chat/completions", {"guided_json": "{"}, "guided_json"),
        ("chat/completions", {"guided_choice": []}, "guided_choice"),
        ("completions", {"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar"),
        ("completions", {"structured_outputs": {"json": {}}, "guided_regex": "a"}, "guided_regex"),
        ("chat/completions", {"presence_penalty": 2.5}, "presence_penalty"),
        ("chat/completions", {"frequency_penalty": -3}, "frequency_penalty"),
        ("chat/completions", {"repetition_penalty": 0}, "repetition_penalty"),
        ("chat/completions", {"logit_bias": {"5": 101}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"a": 1}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"257": 1}}, "logit_bias"),
        ("completions", {"stop_token_ids": [257]}, "stop_token_ids"),
        ("completions", {"min_tokens": 13}, "min_tokens"),
        ("completions", {"min_p": 1.5}, "min_p"),
        ("completions", {"typical_p": 0}, "typical_p"),
        ("completions", {"bad_words": [""]}, "bad_words[0]"),
        ("completions", {"use_beam_search": True}, "use_beam_search"),
        ("completions", {"allowed_token_ids": [1]}, "allowed_token_ids"),
        ("chat/completions", {"audio": {"voice": "a"}}, "audio"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "friend", "content": "a"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1].type",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}, MESSAGES[0]]}, "messages"),
        ("completions", {"suffix": "a"}, "suffix"),
        ("completions", {"best_of": 2}, "best_of"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": [257]}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": None}, "prompt"),
        ("completions", {"temperature": 2.5}, "temperature"),
        ("completions", {"temperature": True}, "temperature"),
        ("completions", {"top_p": 0}, "top_p"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"n": 17}, "n"),
        ("completions", {"n": 13, "prompt": ["a"] * 5}, "n"),
        ("completions", {"stop": [""]}, "stop[0]"),
        ("completions", {"stop": 5}, "stop"),
        ("completions", {"seed": 2**63}, "seed"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"speed": "high"}, "speed"),
    ],
)
def test_what_is_not_supported_is_named(http: TestClient, path: str, wrong: dict[str, Any], param: str) -> None:
    good = TALK if path == "chat/completions" else GREEDY
    for stream in (False, True):
        answer = http.post(f"/v1/{path}", json={**good, **wrong, "stream": stream} if stream else {**good, **wrong})
        if stream and param == "stream_options":
            continue
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"]


async def test_errors_are_those_that_the_client_knows(serve: Serve) -> None:
    client, _ = serve()
    with pytest.raises(openai.NotFoundError, match="there are: chat") as unknown:
        await client.completions.create(**{**GREEDY, "model": "gpt"})
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="at most 64 tokens") as long:
        await client.completions.create(**{**GREEDY, "max_tokens": 60})
    assert long.value.code == "context_length_exceeded"
    client, _ = serve(Replicas(a=Replica(gives=[BUSY])))
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="chat is too busy: too late") as busy:
            await client.completions.create(**GREEDY, stream=stream)
        assert busy.value.response.headers["Retry-After"] == "7"
        assert busy.value.type == "rate_limit_error"
    client, _ = serve(Replicas(), timeout_s=0.05)
    with pytest.raises(openai.InternalServerError, match="no replica of chat answered"):
        await client.chat.completions.create(**TALK, stream=True)
    client, _ = serve(template=None)
    with pytest.raises(openai.BadRequestError, match="send a prompt to /v1/completions"):
        await client.chat.completions.create(**TALK)


def test_bodies_that_are_no_json_or_too_large(http: TestClient) -> None:
    for body, status in [(b"{", 400), (b"[]", 400), (b'{"prompt": "' + b"a" * 30_000, 413)]:
        answer = http.post("/v1/completions", content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_every_error_has_openai_s_shape(tmp_path: Path) -> None:
    app = gateway(tmp_path, Replicas(a=Replica(gives=[ValueError("secret")])), keys=["key"])
    http = TestClient(app, headers={"Authorization": "Bearer key"}, raise_server_exceptions=False)
    stranger = TestClient(app)
    answers = {
        401: stranger.get("/v1/models"),
        404: http.get("/v1/nothing"),
        405: http.get("/v1/completions"),
        500: http.post("/v1/completions", json=GREEDY),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answers[401].json()["error"]["code"] == "invalid_api_key"
    assert answers[500].json()["error"]["type"] == "server_error"
    assert "secret" not in answers[500].text


async def read(stream: openai.AsyncStream[Completion], texts: list[str]) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].text)


async def test_an_error_in_the_middle_is_the_last_event(serve: Serve) -> None:
    client, _ = serve(Replicas(a=Replica(dies_after=3)), timeout_s=0.05)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match=r"went on with this answer within 0\.05 s"):
        await read(await client.completions.create(**GREEDY, stream=True), texts)
    assert "".join(texts) == greedy("hello")[:3]
    client, replicas = serve(Replicas(a=Replica(gives=[Piece(ids("a"), "a"), ValueError("secret")])))
    with pytest.raises(openai.APIError, match="internal error; see the server's log"):
        await read(await client.completions.create(**GREEDY, stream=True), texts)
    assert replicas.recorder.ends == [Outcome.FAILED]


async def test_one_failure_ends_all_choices(serve: Serve) -> None:
    client, replicas = serve(Replicas(a=Replica(hangs_after=2), b=Replica(gives=[BUSY])), timeout_s=5)
    for stream in (False, True):
        replicas.replicas["b"].asked.clear()
        replicas.replicas["a"].gives = [BUSY]
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**GREEDY, n=4, stream=stream)
        await asyncio.sleep(0)
        assert [replica.live for replica in replicas.replicas.values()] == [0, 0]


async def test_the_client_sees_no_kill(serve: Serve) -> None:
    client, _ = serve(Replicas(a=Replica(dies_after=4), b=Replica()))
    stream = await client.completions.create(**GREEDY, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == greedy("hello")


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_leaves_a_stream_ends_it(tmp_path: Path, choices: int) -> None:
    replicas = Replicas(a=Replica(pause_s=0.002))
    app = gateway(tmp_path, replicas)
    body = json.dumps({**GREEDY, "max_tokens": 50, "n": choices, "stream": True}).encode()
    left = asyncio.Event()
    parts = iter([{"type": "http.request", "body": body}])
    sent: list[bytes] = []

    async def receive() -> Any:
        if part := next(parts, None):
            return part
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 5:
            left.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    await app(scope, receive, send)
    await asyncio.sleep(0.01)
    assert replicas.replicas["a"].live == 0
    assert len(sent) < 20
    assert replicas.recorder.ends == [Outcome.CANCELLED] * choices


async def test_log_probabilities_of_completions(serve: Serve) -> None:
    client, _ = serve()
    answer = await client.completions.create(**GREEDY, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 12
    assert logprobs.text_offset == list(range(12))
    assert all(len(alternatives) == 3 for alternatives in logprobs.top_logprobs or [])
    assert (await client.completions.create(**GREEDY, logprobs=0)).choices[0].logprobs
    offsets: list[int] = []
    async for chunk in await client.completions.create(**GREEDY, logprobs=0, stream=True):
        assert chunk.choices[0].logprobs
        offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == list(range(12))


async def test_log_probabilities_of_chats(serve: Serve) -> None:
    client, _ = serve()
    answer = await client.chat.completions.create(**TALK, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert (
        b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == answer.choices[0].message.content
    )
    assert [token.logprob for token in logprobs.content] == [-0.5] * 12
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * 12
    stream = await client.chat.completions.create(**TALK, logprobs=True, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert sum(len(chunk.logprobs.content or []) for chunk in chunks if chunk.logprobs) == 12


def test_tokens_that_are_parts_of_characters() -> None:
    shape = CompletionShape(TokenTexts(TOKENIZER), None)
    rows = tuple(TokenLogprobs(token, -math.inf, (), ()) for token in ids("aé…z"))
    logprobs = shape.part(0, Piece(ids("aé…z"), "aé…z", rows))["logprobs"]
    assert logprobs["tokens"] == ["a", *(f"bytes:\\x{byte:02x}" for byte in "é…".encode()), "z"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 3]
    assert logprobs["token_logprobs"] == [-9999.0] * 7
    assert TokenTexts(TOKENIZER)[256].text == "</s>"


def test_tokens_of_sentencepiece() -> None:
    vocabulary: list[tuple[str, float]] = [("<unk>", 0.0), ("▁the", -1.0), ("<0xC3>", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    texts = TokenTexts(tokenizer)
    assert [texts[token].text for token in (1, 2, 99)] == [" the", "bytes:\\xc3", ""]


async def test_models_are_listed(serve: Serve) -> None:
    client, _ = serve()
    [model] = [model async for model in client.models.list()]
    assert (model.id, model.owned_by) == ("chat", "pliant")
    assert model.model_dump() == (await client.models.retrieve("chat")).model_dump()
    assert model.model_dump()["parent"] is None
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")


def test_chat_templates_see_what_transformers_shows_them() -> None:
    loop = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    rest = "{{ {'a<': 'ä'} | tojson }}{{ strftime_now('%Y') | length }}"
    template = ChatTemplate("{{ bos_token }}" + loop + rest, {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]) == '<s>x{"a<": "ä"}4'


@pytest.mark.parametrize("escape", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"])
def test_chat_templates_are_kept_in(escape: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(escape + "{{ messages.__class__.x }}", {}).render([])


def test_what_is_no_chat_template() -> None:
    with pytest.raises(ModelError, match="no jinja2 template"):
        ChatTemplate("{% for %}", {})


def test_whose_errors_have_which_shape() -> None:
    assert speaks_openai({"path": "/v1/models"})
    assert speaks_openai({"path": "/llm/v1/chat", "root_path": "/llm"})
    assert not speaks_openai({"path": "/models/v1"})
    assert not speaks_openai({"path": "/v10"})
