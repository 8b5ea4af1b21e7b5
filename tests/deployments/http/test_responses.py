"""OpenAI's Responses endpoint with the real client: what goes in is a chat, and what comes out are its types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from support.openai_client import connect, saying
from support.scripted import Replica, Replicas, ids

from pliant.deployments.llm.request import Piece

pytestmark = pytest.mark.virtual_time

TEMPLATE = (
    "{% if tools %}{{ tools | length }}{{ tools[0].function.name }};{% endif %}{% for m in messages %}"
    "{{ m.role[0] }}:{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments.x }}{% endfor %}{% endfor %}a:{# </think> #}"
)
TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
CALL = '<think>Hm.</think>I look.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
HERMES: Any = {"template": TEMPLATE, "tool_parser": "hermes"}


async def test_a_text(tmp_path: Path) -> None:
    replicas = saying("Yes.")
    client = connect(tmp_path, replicas)
    response = await client.responses.create(
        model="chat", input="y", instructions="x", temperature=0.5, top_p=0.5, max_output_tokens=9, metadata={"a": "b"}
    )
    assert (response.output_text, response.status, response.model) == ("Yes.", "completed", "chat")
    assert (response.instructions, response.metadata, response.temperature) == ("x", {"a": "b"}, 0.5)
    assert response.usage
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (10, 4, 14)
    [asked] = replicas.asked
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.max_tokens) == (0.5, 0.5, 9)
    parts = [{"type": "message", "role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    await client.responses.create(model="chat", input=parts)  # type: ignore[arg-type]
    assert replicas.asked[-1].prompt == asked.prompt


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_was_cached(tmp_path: Path, streamed: bool) -> None:
    client = connect(tmp_path, Replicas(a=Replica(cached=2)))
    asked: Any = {"model": "chat", "input": "y"}
    if streamed:
        [*_, last] = [event async for event in await client.responses.create(**asked, stream=True)]
        response = last.response
    else:
        response = await client.responses.create(**asked)
    assert response.usage.input_tokens_details.cached_tokens == 2


async def test_one_that_was_cut(tmp_path: Path) -> None:
    response = await connect(tmp_path, saying("Ye", finish="length")).responses.create(model="chat", input="y")
    assert (response.output_text, response.status) == ("Ye", "incomplete")
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_the_tool_loop(tmp_path: Path) -> None:
    """As OpenAI's own example goes: output joins the input, then what the tool answered."""
    replicas = saying(CALL)
    client = connect(tmp_path, replicas, **HERMES)
    talk: list[Any] = [{"role": "user", "content": "y"}]
    response = await client.responses.create(model="chat", input=talk, tools=TOOLS)
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert reasoning.content[0].text == "Hm."
    assert message.type == "message"
    assert response.output_text == "I look."
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("f", '{"x": 1}', "completed")
    assert response.usage
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert replicas.asked[-1].prompt == ids("1f;u:ya:")
    talk += response.output
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    await client.responses.create(model="chat", input=talk, tools=TOOLS, tool_choice="none")
    assert replicas.asked[-1].prompt == ids("u:ya:Hm.I look.f1t:2a:")


@pytest.mark.parametrize("streamed", [False, True])
async def test_text_behind_a_call_may_come_with_the_end_of_it(tmp_path: Path, streamed: bool) -> None:
    begin, end = '<tool_call>\n{"name": "f", "arguments": {"x": 1', "}}\n</tool_call>\nDone."
    pieces = [Piece(ids(begin), begin), Piece(ids(end), end, None, "stop")]
    client = connect(tmp_path, Replicas(a=Replica(gives=pieces)), **HERMES)
    if streamed:
        async with client.responses.stream(model="chat", input="y", tools=TOOLS) as stream:
            response: Any = await stream.get_final_response()
    else:
        response = await client.responses.create(model="chat", input="y", tools=TOOLS)
    call, message = response.output
    assert (call.type, call.arguments) == ("function_call", '{"x": 1}')
    assert (message.type, response.output_text) == ("message", "\nDone.")


async def test_a_tool_that_must_be_called(tmp_path: Path) -> None:
    replicas = saying('{"x": 1}')
    named: Any = {"type": "function", "name": "f"}
    response = await connect(tmp_path, replicas).responses.create(
        model="chat", input="y", tools=TOOLS, tool_choice=named, parallel_tool_calls=False
    )
    [call] = response.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("f", '{"x": 1}')
    assert replicas.asked[0].grammar


class Step(BaseModel):
    name: Literal["for", "with"]


async def test_a_form_of_pydantic(tmp_path: Path) -> None:
    replicas = saying('{"name": "for"}')
    response = await connect(tmp_path, replicas).responses.parse(model="chat", input="y", text_format=Step)
    assert response.output_parsed == Step(name="for")
    assert replicas.asked[0].grammar


async def test_a_stream_has_all_the_events_of_the_same_response(tmp_path: Path) -> None:
    client = connect(tmp_path, saying(CALL), **HERMES)
    whole = await client.responses.create(model="chat", input="y", tools=TOOLS)
    kinds: list[str] = []
    text = arguments = ""
    async with client.responses.stream(model="chat", input="y", tools=TOOLS) as stream:
        async for event in stream:
            kinds.append(event.type)
            assert event.sequence_number == len(kinds) - 1
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        last = await stream.get_final_response()
    assert (text, arguments) == ("I look.", '{"x": 1}')
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    for kind in ("added", "done"):
        assert kinds.count(f"response.output_item.{kind}") == 3
        assert kinds.count(f"response.content_part.{kind}") == 2


async def test_log_probabilities(tmp_path: Path) -> None:
    client = connect(tmp_path, Replicas(a=Replica()))
    response = await client.responses.create(model="chat", input="y", top_logprobs=2, max_output_tokens=3)
    [message] = response.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert [len(row.top_logprobs) for row in part.logprobs or ()] == [2, 2, 2]
    assert "".join(row.token for row in part.logprobs or ()) == response.output_text


async def test_a_response_that_is_cut_off(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(gives=[Piece(ids("ab"), "ab"), RuntimeError("broken")]))
    client = connect(tmp_path, replicas)
    events = [event async for event in await client.responses.create(model="chat", input="y", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"tools": [{"type": "web_search", "name": "f"}]}, "tools[0].type", "function"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0]", "must be of type message"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments", "missing"),
        ({"input": []}, "input", "at least one"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"max_output_tokens": 1000}, None, "at most 64 tokens"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
            "text.format.schema",
            "text.format.schema",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"best_of": 2}, "best_of", "unknown parameter"),
    ],
)
async def test_what_is_refused_says_which_parameter(tmp_path: Path, wrong: Any, param: str | None, says: str) -> None:
    client = connect(tmp_path, saying("Yes."))
    body = {"model": "chat", "input": "y", **wrong}
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        await client.post("/responses", body=body, cast_to=object)
    assert refused.value.param == param
