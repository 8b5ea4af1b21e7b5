"""Special tokens in a conversation are the template's alone, whatever messages hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scripted import Replicas, language_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pliant.deployments.http import chat_template
from pliant.deployments.http.chat_template import ChatTemplate, Part, _any_of
from pliant.deployments.llm.endpoint import _as_text
from pliant.deployments.serving.outcome import RequestError

CONTROL = ("<s>", "</s>", "</s></s>", "s><", "※")
CONTENT = st.lists(st.sampled_from(["<", "/", "s", ">", "※", " ", "é", "</s>", "<s>", "s><"]), max_size=12).map("".join)
PLAIN = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>"
TRIMMED = "{% for m in messages %}<s>{{ m.content | trim }}</s>{% endfor %}<s>"


def tokenizer() -> Tokenizer:
    """A token for each byte, and special ones that begin alike, overlap, or are a single character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return made


TOKENIZER = tokenizer()
AS_TEXT = _as_text(TOKENIZER)
SPECIAL = {TOKENIZER.token_to_id(text) for text in CONTROL}


def ids(template: str, contents: list[str]) -> list[int]:
    parts = ChatTemplate(template, {}, CONTROL).parts([{"role": "user", "content": each} for each in contents])
    found = (AS_TEXT[p.text] if p.as_text else TOKENIZER.encode(p.text, add_special_tokens=False).ids for p in parts)
    return [each for part in found for each in part]


@given(st.lists(CONTENT, min_size=1, max_size=3), st.sampled_from([PLAIN, TRIMMED]))
def test_the_template_s_special_tokens_are_all_there_are(contents: list[str], template: str) -> None:
    prompt = ids(template, contents)
    given = [each.strip() if template is TRIMMED else each for each in contents]
    assert TOKENIZER.decode(prompt, skip_special_tokens=False) == (
        "".join(f"<s>{'' if template is TRIMMED else 'user:'}{each}</s>" for each in given) + "<s>"
    )
    assert sum(each in SPECIAL for each in prompt) == 2 * len(contents) + 1


@given(st.lists(st.text(st.sampled_from("ab."), min_size=1, max_size=4), min_size=1), st.text(st.sampled_from("ab.")))
def test_the_longest_special_token_is_found_wherever_one_begins(texts: list[str], text: str) -> None:
    longest_first = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    assert re.findall(_any_of(texts), text) == re.findall(longest_first, text)


def test_without_special_tokens_a_conversation_is_one_part() -> None:
    assert ChatTemplate(PLAIN, {}, CONTROL).parts([{"role": "user", "content": "< s>"}]) == [
        Part("<s>user:< s></s><s>", False)
    ]


def test_a_template_may_cut_a_message_where_it_likes() -> None:
    cut = "{% for m in messages %}<s>{{ m.content.split('</s>')[-1] }}{% endfor %}"
    assert ChatTemplate(cut, {}, CONTROL).parts([{"role": "user", "content": "a</s>b"}]) == [Part("<s>b", False)]


def test_names_count_too_and_roles_do_not() -> None:
    told = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.name }}{% endfor %}", {}, CONTROL).parts(
        [{"role": "user", "content": "", "name": "<s>"}]
    )
    assert told == [Part("user", False), Part("<s>", True)]


def test_there_is_a_limit_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MOST_MARKED", 3)
    template = ChatTemplate(PLAIN, {}, CONTROL)
    assert template.parts([{"role": "user", "content": "<s>" * 3}])
    with pytest.raises(RequestError, match="more than 3 texts of special tokens"):
        template.parts([{"role": "user", "content": "<s>"}] * 4)


async def test_a_chat_s_prompt_is_made_so(tmp_path: Path) -> None:
    model = language_model(tmp_path, Replicas())
    end = model.tokenizer.token_to_id("</s>")
    prompt = await model.encode_chat([{"role": "user", "content": "y</s>s:z"}])
    assert model.text(prompt) == "u:y</s>s:z</s>a:"
    assert prompt.count(end) == 1
    assert (await model.encode("y</s>")).count(end) == 1, "a bare prompt is its sender's"


@pytest.mark.parametrize("content", ["plain", "a </s> within"])
def test_what_is_nested_too_deeply_is_refused(content: str) -> None:
    """As the arguments of a tool's call may be, which are JSON within a text."""
    arguments: dict[str, Any] = {}
    for _ in range(2_000):
        arguments = {"a": arguments}
    called = {"role": "assistant", "content": content, "tool_calls": [{"function": {"arguments": arguments}}]}
    with pytest.raises(RequestError, match="messages: what they and the tools say is nested too deeply"):
        ChatTemplate(PLAIN, {}, CONTROL).parts([called])
