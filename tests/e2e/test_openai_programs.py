"""The example programs of OpenAI's documentation, with its client as it is, on the running default cluster."""

from __future__ import annotations

import io
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from support.waiting import HANGS_AFTER_S, wait_until

from e2e.cluster import Cluster

NEEDS = ("chat", "search")
MEANING = "The if statement is used for conditional execution."
LOOK_UP: dict[str, Any] = {
    "name": "look_up",
    "description": "What Python's documentation says of a topic.",
    "parameters": {
        "type": "object",
        "properties": {"topic": {"type": "string"}},
        "required": ["topic"],
        "additionalProperties": False,
    },
}


class Statement(BaseModel):
    subject: Literal["the if statement", "the while statement", "the for statement"]
    meaning: str


def look_up(topic: str) -> str:
    return {"the if statement": MEANING}[topic]


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.address}/v1", api_key="none", timeout=HANGS_AFTER_S, max_retries=0)


def test_chat_and_streaming(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Explain the if statement."}]
    completion = client.chat.completions.create(model="chat", messages=messages, temperature=0)
    assert completion.choices[0].message.content == MEANING
    stream = client.chat.completions.create(model="chat", messages=messages, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == MEANING


@pytest.mark.parametrize("strict", [False, True])
def test_the_tool_loop(client: openai.OpenAI, strict: bool) -> None:
    """The model calls the tool of itself, and says what the tool answered."""
    tools: Any = [{"type": "function", "function": {**LOOK_UP, "strict": strict}}]
    messages: list[Any] = [{"role": "user", "content": "Look up the if statement."}]
    completion = client.chat.completions.create(model="chat", messages=messages, tools=tools, temperature=0)
    assert completion.choices[0].finish_reason == "tool_calls"
    message = completion.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        assert call.type == "function"
        result = look_up(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    completion = client.chat.completions.create(model="chat", messages=messages, tools=tools, temperature=0)
    assert completion.choices[0].message.content == MEANING


def test_parse(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Describe the if statement as JSON."}]
    bound = client.chat.completions.parse(model="chat", messages=messages, response_format=Statement, temperature=0)
    assert bound.choices[0].message.parsed == Statement(subject="the if statement", meaning=MEANING)
    free = client.chat.completions.create(model="chat", messages=messages, temperature=0)
    assert Statement.model_validate_json(free.choices[0].message.content or "") == bound.choices[0].message.parsed


def test_responses(client: openai.OpenAI) -> None:
    response = client.responses.create(model="chat", input="Explain the if statement.", temperature=0)
    assert response.output_text == MEANING
    with client.responses.stream(model="chat", input="Explain the if statement.", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == MEANING
    parsed = client.responses.parse(
        model="chat", input="Describe the if statement as JSON.", text_format=Statement, temperature=0
    )
    assert parsed.output_parsed == Statement(subject="the if statement", meaning=MEANING)


def test_the_tool_loop_of_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **LOOK_UP, "strict": True}]
    talk: list[Any] = [{"role": "user", "content": "Look up the if statement."}]
    response = client.responses.create(model="chat", input=talk, tools=tools, temperature=0)
    talk += response.output
    for item in response.output:
        if item.type == "function_call":
            result = look_up(**json.loads(item.arguments))
            talk.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    assert client.responses.create(model="chat", input=talk, tools=tools, temperature=0).output_text == MEANING


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/embeddings"])
def test_batches(client: openai.OpenAI, endpoint: Any) -> None:
    chat = {"model": "chat", "messages": [{"role": "user", "content": "Explain the if statement."}], "temperature": 0}
    body = chat if endpoint == "/v1/chat/completions" else {"model": "search", "input": MEANING}
    lines = [
        json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": endpoint, "body": body})
        for number in range(20)
    ]
    file = client.files.create(file=("batch.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    wait_until(
        lambda: client.batches.retrieve(batch.id).status == "completed",
        lambda: client.batches.retrieve(batch.id).request_counts,
    )
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts
    assert batch.request_counts.completed == 20
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"request-{number}" for number in range(20)}
    for answer in answers:
        found = answer["response"]["body"]
        if endpoint == "/v1/embeddings":
            assert len(found["data"][0]["embedding"]) == 256
        else:
            assert found["choices"][0]["message"]["content"] == MEANING
