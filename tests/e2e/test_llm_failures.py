"""Replicas of the language model die, clients leave, too many come: no answer is lost, changed or hung."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from support.waiting import HANGS_AFTER_S, until, wait_until

from e2e.cluster import Cluster

REPLICAS = 2
STREAMS = 12


def replicas(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The gateway's view of the language model's replicas."""
    return cluster.stats("chat")


def served(cluster: Cluster) -> dict[str, int]:
    """By replica, as of its last report."""
    return {name: report["served"] for name, report in replicas(cluster).items()}


async def until_idle(cluster: Cluster) -> None:
    def idle() -> bool:
        return not any(each["live"] or each["held"] for each in replicas(cluster).values())

    await asyncio.to_thread(wait_until, idle, cluster.progress)


async def all_report(cluster: Cluster, client: openai.AsyncOpenAI) -> int:
    """Ask until each replica has told of an answer that it gave after this call, and together of as many as were asked
    for: how many that is."""
    request: dict[str, Any] = {"model": "chat", "prompt": "to each", "max_tokens": 16}
    before, asked = served(cluster), 0
    while True:
        now = served(cluster)
        if now.keys() != before.keys():
            before, asked = now, 0
        if sum(now.values()) >= sum(before.values()) + asked:  # they have told of all
            if all(now[name] > before[name] for name in now):
                return asked
            await asyncio.gather(*(client.completions.create(**request) for _ in range(REPLICAS)))
            asked += REPLICAS
        await asyncio.sleep(0.1)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a service all of whose replicas are there and idle."""
    url = f"{cluster.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=HANGS_AFTER_S, max_retries=0) as client:
        await until(lambda: len(cluster.replica_processes("chat")) == len(replicas(cluster)) == REPLICAS)
        await all_report(cluster, client)
        await until_idle(cluster)
        yield client


class Reader:
    """Reads one long answer."""

    def __init__(self, client: openai.AsyncOpenAI, index: int, max_tokens: int) -> None:
        self.text = ""
        self.finish: str | None = None
        self.begun = asyncio.Event()
        self._client = client
        self._request: dict[str, Any] = {
            "model": "chat",
            "prompt": f"The {index}th rule of Python is",
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }

    async def read(self) -> tuple[str, str | None]:
        async for chunk in await self._client.completions.create(**self._request, stream=True):
            self.text += chunk.choices[0].text
            self.begun.set()
            self.finish = chunk.choices[0].finish_reason
        return self.text, self.finish

    async def leave(self) -> None:
        """Go away as soon as there is something to read."""
        async with await self._client.completions.create(**self._request, stream=True) as stream:
            await anext(aiter(stream))


async def length(client: openai.AsyncOpenAI) -> int:
    """Tokens of an answer that takes long, for the model that there is."""
    model: Any = await client.models.retrieve("chat")
    return int(model.max_model_len) * 3 // 4


async def test_answers_wait_for_a_replica_when_all_die(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    max_tokens = await length(client)
    expected = await asyncio.gather(*(Reader(client, index, max_tokens).read() for index in range(4)))
    readers = [Reader(client, index, max_tokens) for index in range(4)]
    reading = [asyncio.create_task(reader.read()) for reader in readers]
    await asyncio.gather(*(reader.begun.wait() for reader in readers))
    for process in cluster.replica_processes("chat"):
        process.kill()
    assert await asyncio.gather(*reading) == expected


WORDS = {"type": "string", "pattern": "^((for|while) ){90}$"}
LISTS = {"type": "object", "properties": {"words": WORDS}, "required": ["words"], "additionalProperties": False}
TRIES = 20
FEATURES: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": LISTS}}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": LISTS}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    {"n": 4, "seed": 3, "temperature": 1.0, "presence_penalty": 0.5, "extra_body": {"ignore_eos": True}},
]


class ChatReader:
    """Reads the answers to a chat with some feature, choice by choice."""

    def __init__(self, client: openai.AsyncOpenAI, feature: dict[str, Any], max_tokens: int) -> None:
        self.begun = asyncio.Event()
        self._client = client
        talk = [{"role": "user", "content": "Explain the for statement."}]
        given = {"model": "chat", "messages": talk, "max_completion_tokens": max_tokens, "temperature": 0}
        self._request: dict[str, Any] = {**given, **feature}

    async def read(self) -> dict[int, tuple[str, str, str | None]]:
        """By choice: its text, arguments of its calls, and why it ended."""
        found: dict[int, tuple[str, str, str | None]] = {}
        async for chunk in await self._client.chat.completions.create(**self._request, stream=True):
            [choice] = chunk.choices
            text, arguments, _ = found.get(choice.index, ("", "", None))
            for call in choice.delta.tool_calls or ():
                arguments += call.function.arguments or ""
            found[choice.index] = text + (choice.delta.content or ""), arguments, choice.finish_reason
            if text or arguments:
                self.begun.set()
        return found


async def test_bound_answers_calls_and_choices_survive_their_replicas(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    max_tokens = await length(client)
    expected = await asyncio.gather(*(ChatReader(client, feature, max_tokens).read() for feature in FEATURES))
    bound, called, several = expected
    for arguments in (bound[0][0], called[0][1]):
        assert len(json.loads(arguments)["words"].split()) == 90
    assert len({text for text, _, _ in several.values()}) == 4
    left = set(range(len(FEATURES)))
    for _ in range(TRIES):
        readers = [ChatReader(client, feature, max_tokens) for feature in FEATURES]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await asyncio.gather(*(readers[index].begun.wait() for index in left))
        if amid := {index for index in left if not reading[index].done()}:
            for process in cluster.replica_processes("chat"):
                process.kill()
        assert await asyncio.gather(*reading) == expected
        left -= amid
        if not left:
            return
    pytest.fail("answers end before a replica can be killed amid each of them")


async def test_a_client_that_leaves_frees_its_slot(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    before = sum(served(cluster).values())
    max_tokens = await length(client)
    await asyncio.gather(*(Reader(client, index, max_tokens).leave() for index in range(STREAMS)))
    await until_idle(cluster)
    asked = await all_report(cluster, client)
    assert sum(served(cluster).values()) < before + asked + STREAMS, "they were computed anyway"


async def test_overload_is_refused_with_a_time_to_come_back(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """More than slots and queues hold: what comes on top is refused, streamed or not; then it goes on.

    A stream may have begun with some of its choices before there is no place for another: then an event ends it.
    """
    overload: dict[str, Any] = {"model": "chat", "prompt": "overload", "n": 16, "max_tokens": await length(client)}

    async def request(index: int) -> None:
        answer = await client.completions.create(**overload, stream=bool(index % 2), extra_body={"ignore_eos": True})
        if index % 2:
            assert [chunk async for chunk in answer][-1].choices[0].finish_reason

    requests = [asyncio.create_task(request(index)) for index in range(48)]
    await until(lambda: sum(task.done() and bool(task.exception()) for task in requests) >= 4)
    for task in requests:
        task.cancel()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert any(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), "none was taken"
    for error in outcomes:
        if isinstance(error, Exception):
            assert "too busy" in str(error)
            if isinstance(error, openai.APIStatusError):
                assert isinstance(error, openai.RateLimitError), error
                assert int(error.response.headers["Retry-After"]) >= 1
    await until_idle(cluster)
    await client.completions.create(model="chat", prompt="calm", max_tokens=4)


async def test_a_file_of_requests_goes_on_when_its_gateway_dies(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    patient = client.with_options(max_retries=1_000)
    body = {"model": "chat", "prompt": "The for statement", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number in range(96)
    ]
    file = await patient.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = await patient.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

    async def completed() -> int:
        nonlocal batch
        batch = await patient.batches.retrieve(batch.id)
        assert batch.request_counts
        return batch.request_counts.completed

    while True:
        if await completed():
            break
        await asyncio.sleep(0.1)
    assert batch.status == "in_progress"
    for process in cluster.replica_processes("gateway"):
        process.kill()
    while batch.status == "in_progress":
        await completed()
        await asyncio.sleep(0.5)
    assert (batch.status, await completed()) == ("completed", len(lines))
    texts = [json.loads(line) for line in (await patient.files.content(batch.output_file_id or "")).text.splitlines()]
    assert {each["custom_id"] for each in texts} == set(map(str, range(len(lines))))
    assert len({each["response"]["body"]["choices"][0]["text"] for each in texts}) == 1
