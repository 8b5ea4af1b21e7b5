"""The `openai` client, unchanged, against the language model of the running default cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.waiting import HANGS_AFTER_S

from e2e.cluster import Cluster

PROMPT = "A generator function is"
TALK: Any = [{"role": "user", "content": "What does the yield expression do?"}]
GREEDY: dict[str, Any] = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
STREAMS = 64


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.address}/v1", api_key="none", timeout=HANGS_AFTER_S, max_retries=0)


@pytest.fixture
async def together(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{cluster.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=HANGS_AFTER_S, max_retries=0) as client:
        yield client


def test_a_completion_is_text_about_python(client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY)
    text = answer.choices[0].text
    assert sum(character.isalpha() or character.isspace() for character in text) > len(text) / 2, text
    assert answer.usage
    assert 0 < answer.usage.completion_tokens <= 40
    assert client.completions.create(**GREEDY).choices[0].text == text


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=TALK, max_completion_tokens=20, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            model="chat", messages=TALK, max_completion_tokens=20, temperature=0, stream=True
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_a_stream_says_the_same_and_counts(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY)
    *chunks, last = client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.usage == whole.usage


def test_stop(client: openai.OpenAI) -> None:
    text = client.completions.create(**GREEDY).choices[0].text
    stop = text[len(text) // 2 :][:4]
    for stream in (False, True):
        answer = client.completions.create(**GREEDY, stop=["never said", stop], stream=stream)
        chunks: Any = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_seeds(client: openai.OpenAI) -> None:
    warm = {**GREEDY, "temperature": 1.0}
    first, second = client.completions.create(**warm, seed=7, n=2).choices
    assert client.completions.create(**warm, seed=7).choices[0].text == first.text
    assert client.completions.create(**warm, seed=8).choices[0].text == second.text
    assert first.text != second.text


def test_log_probabilities(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(**GREEDY, logprobs=3).choices[0].logprobs
    assert logprobs
    assert logprobs.tokens
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True
    ):
        assert value <= 0
        assert top[token] == max(top.values()), "greedy takes the likeliest"
    prompt = "".join(logprobs.tokens)
    echoed = client.completions.create(model="chat", prompt=prompt, echo=True, logprobs=0, max_tokens=0, n=2)
    for choice in echoed.choices:
        assert choice.text == prompt
        assert choice.logprobs
        assert choice.logprobs.token_logprobs
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:] if value is not None)
    chat = client.chat.completions.create(
        model="chat", messages=TALK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs
    assert content
    assert content.content
    for scored in content.content:
        assert scored.token == scored.top_logprobs[0].token
        assert scored.logprob == scored.top_logprobs[0].logprob


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are: chat"):
        client.completions.create(**{**GREEDY, "model": "gpt"})
    with pytest.raises(openai.BadRequestError, match="tokens, prompt and answer together") as long:
        client.completions.create(**{**GREEDY, "max_tokens": 10**6})
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="not supported here") as spoken:
        client.chat.completions.create(model="chat", messages=TALK, modalities=["text", "audio"])
    assert spoken.value.param == "modalities"
    with pytest.raises(openai.NotFoundError) as unrouted:
        client.post("/nothing", cast_to=object)
    assert unrouted.value.type == "invalid_request_error"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert "chat" in [model.id for model in client.models.list()]
    assert client.models.retrieve("chat").object == "model"


async def test_no_token_of_64_streams_is_mixed_up(together: openai.AsyncOpenAI) -> None:
    """Each says what it says alone, though they share every decode step."""
    prompts = [f"{PROMPT} {index} {'and so on ' * (index % 7)}" for index in range(STREAMS)]

    async def streamed(index: int) -> str:
        stream = await together.completions.create(
            **{**GREEDY, "prompt": prompts[index], "max_tokens": 10 + index % 40}, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    at_once = await asyncio.gather(*(streamed(index) for index in range(STREAMS)))
    alone = [await streamed(index) for index in range(STREAMS)]
    assert at_once == alone


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
WRONG = st.sampled_from(["model", "messages", "prompt", "n", "stop", "temperature", "stream", "logprobs", "tools", "x"])


def test_malformed_bodies_are_refused_in_openai_s_shape(cluster: Cluster) -> None:
    with httpx.Client(base_url=f"{cluster.address}/v1", timeout=HANGS_AFTER_S) as http:

        @settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(["/completions", "/chat/completions"]), WRONG, JSON)
        def refused_or_answered(path: str, key: str, value: Any) -> None:
            good = {"model": "chat", "max_tokens": 1, "temperature": 0}
            good |= {"messages": TALK} if path.startswith("/chat") else {"prompt": PROMPT}
            answer = http.post(path, content=json.dumps({**good, key: value}).encode())
            if answer.status_code != 200:
                assert 400 <= answer.status_code < 500, answer.text
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        refused_or_answered()
