"""Every field of a conversation reaches the model's chat template, or is ignored by design."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import tiny_llm
from support.scripted import TOKENIZER
from support.tiny_llm import TinyLlm

from pliant.deployments.http.openai_body import Body, Neutral
from pliant.deployments.http.openai_messages import FunctionCall, Message, ToolCall
from pliant.deployments.http.openai_responses import (
    CallItem,
    MessageItem,
    OutputItem,
    Part,
    ReasoningItem,
    ReasoningPart,
)

TEMPLATE = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
ASKS: dict[str, Any] = {"role": "user", "content": "a"}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CALLS: list[Any] = [ASKS, {"role": "assistant", "tool_calls": [CALL]}]
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
ANSWERED: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "seen"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
SAYS: dict[str, Any] = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}

READ: dict[tuple[type[Body], str], tuple[list[Any], str]] = {
    (Message, "role"): ([{**ASKS, "role": "developer"}], '"role": "system"'),
    (Message, "content"): ([{**ASKS, "content": [{"type": "text", "text": "x"}] * 2}], '"content": "x\\nx"'),
    (Message, "name"): ([{**ASKS, "name": "ann"}], '"name": "ann"'),
    (Message, "tool_calls"): (CALLS, '"tool_calls": [{"id": "c1"'),
    (Message, "tool_call_id"): (
        [*CALLS, {"role": "tool", "tool_call_id": "c1", "content": "seen"}],
        '"tool_call_id": "c1"',
    ),
    (Message, "reasoning_content"): (
        [{"role": "assistant", "content": "b", "reasoning_content": "hm"}, ASKS],
        '"reasoning_content": "hm"',
    ),
    (ToolCall, "id"): (CALLS, '"id": "c1"'),
    (ToolCall, "type"): (CALLS, '"type": "function"'),
    (ToolCall, "function"): (CALLS, '"function": {"name": "look"'),
    (FunctionCall, "name"): (CALLS, '"name": "look"'),
    (FunctionCall, "arguments"): (CALLS, '"arguments": {"at": 1}'),
    (MessageItem, "type"): ([{"type": "message", **ASKS}], '"content": "a"'),
    (MessageItem, "role"): ([{**ASKS, "role": "system"}, ASKS], '"role": "system"'),
    (MessageItem, "content"): ([{**ASKS, "content": "other"}], '"content": "other"'),
    (CallItem, "type"): ([ASKS, CALLED, ANSWERED], '"tool_calls": ['),
    (CallItem, "call_id"): ([ASKS, CALLED, ANSWERED], '"id": "c1"'),
    (CallItem, "name"): ([ASKS, CALLED, ANSWERED], '"name": "look"'),
    (CallItem, "arguments"): ([ASKS, CALLED, ANSWERED], '"arguments": {"at": 1}'),
    (OutputItem, "type"): ([ASKS, CALLED, ANSWERED], '"role": "tool"'),
    (OutputItem, "call_id"): ([ASKS, CALLED, ANSWERED], '"tool_call_id": "c1"'),
    (OutputItem, "output"): ([ASKS, CALLED, ANSWERED], '"content": "seen"'),
    (ReasoningItem, "type"): ([ASKS, THOUGHT, SAYS, ASKS], '"reasoning_content": "hm"'),
    (ReasoningItem, "content"): ([ASKS, THOUGHT, SAYS, ASKS], '"reasoning_content": "hm"'),
    (ReasoningPart, "type"): ([ASKS, THOUGHT, SAYS, ASKS], '"reasoning_content": "hm"'),
    (ReasoningPart, "text"): ([ASKS, THOUGHT, SAYS, ASKS], '"reasoning_content": "hm"'),
    (Part, "type"): ([ASKS, SAYS, ASKS], '"content": "b"'),
    (Part, "text"): ([ASKS, SAYS, ASKS], '"content": "b"'),
}
"""By field: a conversation, and what the model reads of it."""

ITEM = {"id": "i1", "status": "completed"}
IGNORED: dict[type[Body], dict[str, Any]] = {
    MessageItem: {**ITEM, "phase": "final_answer"},
    CallItem: ITEM,
    OutputItem: ITEM,
    ReasoningItem: {**ITEM, "summary": []},
    Part: {"annotations": [], "logprobs": []},
}
"""What comes back when the output of a response is sent again, and was never the model's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llm.save(folder)
    return folder


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[TinyLlm]:
    with closing(TinyLlm(folder)) as served:
        yield served


async def read(served: TinyLlm, path: str, conversation: list[Any]) -> str:
    """What the model reads."""
    transport = httpx.ASGITransport(served.app(template=TEMPLATE))
    name, limit = ("input", "max_output_tokens") if path == "responses" else ("messages", "max_tokens")
    async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as http:
        answer = await http.post(f"/{path}", json={"model": "chat", name: conversation, limit: 1})
    assert answer.status_code == 200, answer.text
    return str(TOKENIZER.decode(served.asked[-1].prompt, skip_special_tokens=False))


@pytest.mark.parametrize(("kind", "name"), READ, ids=lambda each: getattr(each, "__name__", each))
async def test_the_model_reads_it(served: TinyLlm, kind: type[Body], name: str) -> None:
    conversation, words = READ[kind, name]
    path = "chat/completions" if kind in (Message, ToolCall, FunctionCall) else "responses"
    assert words in await read(served, path, conversation)


async def test_arguments_that_a_model_cut_within_a_character_are_read_as_their_text(served: TinyLlm) -> None:
    call = {**CALL, "function": {"name": "look", "arguments": r'{"at": "\ud83d"}'}}
    words = r'"arguments": "{\"at\": \"\\ud83d\"}"'
    assert words in await read(served, "chat/completions", [ASKS, {"role": "assistant", "tool_calls": [call]}])


async def test_what_was_never_the_model_s_changes_nothing(served: TinyLlm) -> None:
    plain = [ASKS, THOUGHT, SAYS, CALLED, ANSWERED, ASKS]
    [part] = SAYS["content"]
    with_all = [
        ASKS,
        {**THOUGHT, **IGNORED[ReasoningItem]},
        {**SAYS, **IGNORED[MessageItem], "content": [{**part, **IGNORED[Part]}]},
        {**CALLED, **IGNORED[CallItem]},
        {**ANSWERED, **IGNORED[OutputItem]},
        ASKS,
    ]
    assert await read(served, "responses", with_all) == await read(served, "responses", plain)


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in READ), ids=lambda kind: kind.__name__)
def test_no_field_is_left_out(kind: type[Body]) -> None:
    accepted = {
        name for name, info in kind.model_fields.items() if not any(isinstance(one, Neutral) for one in info.metadata)
    }
    assert accepted == {name for known, name in READ if known is kind} | IGNORED.get(kind, {}).keys()
