"""What a model thinks comes apart from what it says, however its text comes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.openai_client import connect, saying
from support.scripted import ids

from pliant.deployments.http.reasoning import ReasoningParser, begun, thinks

TALK: Any = [{"role": "user", "content": "y"}]
CASES = [
    (False, "<think>\nOne. Two.\n</think>\n\nThree.\n", "One. Two.", "Three.\n"),
    (True, "\nOne.\n</think>\n\nTwo.", "One.", "Two."),
    (False, " Hello <think>a</think>", "", " Hello <think>a</think>"),
    (False, "<thin", "", "<thin"),
    (False, "\n<think> a </thin b", "a </thin b", ""),
    (True, "cut off </thi", "cut off </thi", ""),
    (False, "<think></think>a</think>", "", "a</think>"),
]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_reasoning_is_found_however_its_text_comes(case: tuple[bool, str, str, str], cuts: list[int]) -> None:
    within, text, reasoning, content = case
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for parts in ([text], list(text), [text[begin:end] for begin, end in pairwise(at)]):
        parser = ReasoningParser(within)
        found = [parser.push(part, index == len(parts) - 1) for index, part in enumerate(parts)]
        assert "".join(each.reasoning for each in found) == reasoning
        assert "".join(each.content for each in found) == content


def test_it_shows_in_template_and_prompt() -> None:
    assert thinks("{% if '</think>' in content %}")
    assert not thinks("{{ message.content }}")
    assert begun("<|im_start|>assistant\n<think>\n")
    assert not begun("<|im_start|>assistant\n<think>\n\n</think>\n\n")


TEMPLATE = (
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}"
)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("text", "asked"),
    [("<think>Hm.</think>Yes.", {}), ("Hm.\n</think>Yes.", {"chat_template_kwargs": {"enable_thinking": True}})],
)
async def test_clients_get_it_apart(tmp_path: Path, text: str, asked: Any) -> None:
    replicas = saying(text)
    client = connect(tmp_path, replicas, template=TEMPLATE)
    message = (await client.chat.completions.create(model="chat", messages=TALK, extra_body=asked)).choices[0].message
    assert (message.content, message.to_dict()["reasoning_content"]) == ("Yes.", "Hm.")
    said = {"reasoning_content": "", "content": ""}
    async for chunk in await client.chat.completions.create(model="chat", messages=TALK, extra_body=asked, stream=True):
        delta = chunk.choices[0].delta.to_dict()
        for key in said:
            said[key] += str(delta.get(key) or "")
    assert said == {"reasoning_content": "Hm.", "content": "Yes."}
    await client.chat.completions.create(model="chat", messages=[*TALK, message])  # type: ignore[list-item]
    assert replicas.asked[-1].prompt == ids("yHm.Yes.")


@pytest.mark.virtual_time
async def test_text_is_left_as_it_is_where_nothing_thinks(tmp_path: Path) -> None:
    text = "<think>Hm.</think>Yes."
    for options in ({}, {"template": TEMPLATE, "reasoning_parser": "none"}):
        answer = await connect(tmp_path, saying(text), **options).chat.completions.create(model="chat", messages=TALK)
        assert answer.choices[0].message.content == text
    answer = await connect(tmp_path, saying(text), reasoning_parser="think").chat.completions.create(
        model="chat", messages=TALK
    )
    assert answer.choices[0].message.content == "Yes."


@pytest.mark.virtual_time
async def test_a_bound_answer_has_none(tmp_path: Path) -> None:
    client = connect(tmp_path, saying('{"a": 1}'), template=TEMPLATE)
    answer = await client.chat.completions.create(
        model="chat",
        messages=TALK,
        response_format={"type": "json_object"},
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    assert answer.choices[0].message.content == '{"a": 1}'


@pytest.mark.virtual_time
async def test_calls_of_tools_come_after_it(tmp_path: Path) -> None:
    text = '<think>I call <tool_call>.</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    client = connect(tmp_path, saying(text), template=TEMPLATE, tool_parser="hermes")
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    message = (await client.chat.completions.create(model="chat", messages=TALK, tools=tools)).choices[0].message
    assert message.to_dict()["reasoning_content"] == "I call <tool_call>."
    assert len(message.tool_calls or []) == 1
