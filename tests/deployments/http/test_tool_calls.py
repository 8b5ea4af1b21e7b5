"""Calls of tools are found in each form of them, however their text comes, and clients get them as OpenAI's do."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from support.scripted import Replica, Replicas, ids, language_model
from support.scripted_executor import EOS, ScriptedExecutor, byte_tokenizer

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.openai_messages import ToolRequest
from pliant.deployments.http.tool_calls import Delta, ToolForm, form_of, grammar, parser
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.deployments.serving.outcome import RequestError
from pliant.deployments.serving.services import Services
from pliant.sampling import Sampling

PLACE = {"type": "object", "properties": {"place": {"enum": ["a}b", 'c"d']}}, "required": ["place"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a place", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock"}},
]
Calls = list[tuple[str, str]]
IN_PARIS = ("weather", '{"place": "Par}\\"is", "in": {"days": [1]}}')
CLOCK = ("clock", "{}")
CASES: list[tuple[ToolForm, str, str, Calls]] = [
    ("hermes", "Let me see.", "Let me see.", []),
    ("hermes", "a <tool b <tool_cal", "a <tool b <tool_cal", []),
    (
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {IN_PARIS[1]}}}\n</tool_call>',
        "",
        [IN_PARIS],
    ),
    (
        "hermes",
        f'I look.\n<tool_call>{{"name":"weather","arguments":{IN_PARIS[1]}}}</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "clock"}\n</tool_call> Done.',
        "I look. Done.",
        [IN_PARIS, CLOCK],
    ),
    ("hermes", "<tool_call>no JSON", "<tool_call>no JSON", []),
    *(
        (form, text, text, [])
        for form, begin, end in (
            ("hermes", "<tool_call>", "</tool_call>"),
            ("llama3_json", "", ""),
            ("mistral", "[", "]"),
        )
        for name in ("get\\_weather", "a\tb", "\\u00zz")
        for text in (f'{begin}{{"name": "{name}", "arguments": {{"a": 1}}}}{end}',)
    ),
    ("hermes", '<tool_call>{"name": "cl\\u006fck", "arguments": {}}</tool_call>', "", [CLOCK]),
    ("llama3_json", f'{{"name": "weather", "parameters": {IN_PARIS[1]}}}', "", [IN_PARIS]),
    (
        "llama3_json",
        '{"name": "clock", "parameters": {}}; '
        f'{{"type": "function", "name": "weather", "parameters": {IN_PARIS[1]}}}',
        "",
        [CLOCK, IN_PARIS],
    ),
    ("llama3_json", 'Say {"name": "clock", "parameters": {}}', 'Say {"name": "clock", "parameters": {}}', []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    (
        "mistral",
        f'[{{"name": "weather", "arguments": {IN_PARIS[1]}}}, {{"name": "clock", "arguments": {{}}}}]',
        "",
        [IN_PARIS, CLOCK],
    ),
    ("mistral", "[no call", "[no call", []),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {IN_PARIS[1]}, "id": "x}}", "of": [{{}}]}}; '
        '{"name": "clock", "parameters": {}}',
        "",
        [IN_PARIS, CLOCK],
    ),
]


def asked(**options: Any) -> ToolRequest:
    return ToolRequest.model_validate({"tools": TOOLS, **options})


def read(request: ToolRequest, form: ToolForm | None, parts: list[str]) -> tuple[str, Calls]:
    found = parser(request, form)
    assert found
    deltas = [found.push(part, index == len(parts) - 1) for index, part in enumerate(parts)]
    return together(deltas)


def together(deltas: list[Delta]) -> tuple[str, Calls]:
    calls: dict[int, tuple[str, str]] = {}
    for delta in (call for each in deltas for call in each.calls):
        assert (delta.name is None) == (delta.number in calls)
        name, arguments = calls.get(delta.number, (delta.name or "", ""))
        calls[delta.number] = name, arguments + delta.arguments
    assert list(calls) == list(range(len(calls)))
    return "".join(delta.content for delta in deltas), list(calls.values())


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 200), max_size=30))
def test_calls_are_found_however_their_text_comes(case: tuple[ToolForm, str, str, Calls], cuts: list[int]) -> None:
    form, text, content, calls = case
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[begin:end] for begin, end in pairwise(at)]
    for way in ([text], parts, list(text)):
        found, there = read(asked(), form, way)
        assert there == calls
        assert found == content


def test_arguments_are_passed_on_as_they_come() -> None:
    found = parser(asked(), "hermes")
    assert found
    found.push('<tool_call>{"name": "weather", "arguments": {"pl', False)
    assert found.push('ace": "Pa', False).calls[0].arguments == 'ace": "Pa'


def test_the_form_shows_in_the_template() -> None:
    assert form_of("{{ '<tool_call>' }}") == "hermes"
    assert form_of('{{ "<|python_tag|>" }}') == "llama3_json"
    assert form_of("[TOOL_CALLS]") == "mistral"
    assert form_of("{{ message.content }}") is None
    with pytest.raises(RequestError, match="set tool_parser"):
        parser(asked(), None)
    assert parser(asked(tool_choice="none"), None) is None


def test_one_call_at_most() -> None:
    form, text, _, calls = CASES[-2]
    assert read(asked(parallel_tool_calls=False), form, list(text))[1] == calls[:1]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("parallel", [None, False])
def test_a_model_that_has_to_call_does(choice: Any, parallel: bool | None) -> None:
    """Its tokens are drawn at random, so nothing but the grammar makes them calls."""
    request = asked(tool_choice=choice, parallel_tool_calls=parallel)
    called = set()
    for seed in range(12):
        bound_to = grammar(request, None)
        generation = Generation("a", (1, 2), 400, Sampling(seed=seed), grammar=bound_to)
        engine = Engine(ScriptedExecutor(1, 500), byte_tokenizer(), (EOS,), 1, 0.05)
        engine.add(generation, engine.guide(generation))
        pieces = []
        while engine.busy:
            pieces += [item for _, item in engine.step() if isinstance(item, Piece)]
        answer = merged(pieces)
        if answer.finish != "stop":
            continue
        content, calls = read(request, None, [piece.text for piece in pieces])
        assert content == ""
        assert len(calls) == 1 or parallel is None
        for name, arguments in calls:
            called.add(name)
            jsonschema.validate(json.loads(arguments), PLACE if name == "weather" else {"type": "object"})
    assert "weather" in called


def test_a_strict_tool_binds_its_arguments_wherever_it_is_called() -> None:
    from llguidance import LLMatcher, LLTokenizer

    strict = asked()
    assert strict.tools
    strict.tools[0].function.strict = True
    bound_to = grammar(strict, "hermes")
    assert bound_to
    assert grammar(asked(), "hermes") is None
    tokens = LLTokenizer(byte_tokenizer().to_str(), eos_token=EOS)
    begin = 'Well.<tool_call>\n{"name": "weather", "arguments": {"place": "'
    for text, right in ((begin + "a}b", True), (begin + "Paris", False), ("Plain < text", True)):
        assert LLMatcher(tokens, bound_to).consume_tokens(list(text.encode())) == right


def gateway(folder: Path, replicas: Replicas, **options: Any) -> FastAPI:
    models = {"chat": language_model(folder, replicas, **options)}
    config, services = GatewayConfig(), Services.of("prompts", models)
    return application(config, services, dict, bytes, LlmKind().routers(services, None, config))


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., tuple[openai.AsyncOpenAI, Replicas]]:
    def serve(text: str, **options: Any) -> tuple[openai.AsyncOpenAI, Replicas]:
        pieces = [Piece(ids(text[at : at + 3]), text[at : at + 3]) for at in range(0, len(text), 3)]
        pieces[-1] = pieces[-1]._replace(finish="stop")
        replicas = Replicas(a=Replica(gives=pieces))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(gateway(tmp_path, replicas, **options)))
        return openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http, max_retries=0), replicas

    return serve


Serve = Callable[..., tuple[openai.AsyncOpenAI, Replicas]]
SHORT: Any = [{"type": "function", "function": {"name": "f"}}]
TEMPLATE = (
    "{% if tools %}{{ tools | length }}{{ tools[0].function.name }};{% endif %}{% for m in messages %}"
    "{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.x }}"
    "{% endfor %}{% endfor %}{{ think }}a:"
)


@pytest.mark.virtual_time
async def test_a_conversation_with_tools(serve: Serve) -> None:
    """As the client's own loop goes: the model calls, the tool answers, and both go back to the model."""
    text = 'Hm.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    client, replicas = serve(text, tool_parser="hermes", template=TEMPLATE)
    talk: Any = [{"role": "user", "content": "y"}]
    whole = await client.chat.completions.create(model="chat", messages=talk, tools=SHORT)
    [choice] = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Hm.")
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", '{"x": 1}')
    assert replicas.asked[-1].prompt == ids("1f;u:ya:")
    talk += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    await client.chat.completions.create(
        model="chat",
        messages=talk,
        tools=SHORT,
        tool_choice="none",
        extra_body={"chat_template_kwargs": {"think": "!"}},
    )
    assert replicas.asked[-1].prompt == ids("u:ya:Hm.f1t:2!a:")


@pytest.mark.virtual_time
async def test_calls_are_streamed(serve: Serve) -> None:
    text = 'Hm.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    client, _ = serve(text, tool_parser="hermes")
    talk: Any = [{"role": "user", "content": "y"}]
    content, calls, finish = "", dict[int, list[str]](), None
    async for chunk in await client.chat.completions.create(model="chat", messages=talk, tools=SHORT, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            assert call.function
            if call.id:
                calls[call.index] = [call.function.name or "", ""]
            calls[call.index][1] += call.function.arguments or ""
    assert (content, calls, finish) == ("Hm.", {0: ["f", '{"x": 1}']}, "tool_calls")


@pytest.mark.virtual_time
async def test_a_named_tool(serve: Serve) -> None:
    client, replicas = serve('{"x": 1}')
    named: Any = {"type": "function", "function": {"name": "f"}}
    answer = await client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "y"}], tools=SHORT, tool_choice=named, n=2, seed=3
    )
    for choice in answer.choices:
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("f", '{"x": 1}')
        assert choice.message.content is None
    assert len({(choice.message.tool_calls or [])[0].id for choice in answer.choices}) == 2
    assert all(generation.grammar for generation in replicas.asked)


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": SHORT}, "tools"),
        ({"tools": SHORT * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": SHORT, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": SHORT, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "b"}}}}}
                ]
            },
            "tools[0].function.parameters.properties.a",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
    ],
)
async def test_mistakes_are_named(serve: Serve, wrong: dict[str, Any], param: str) -> None:
    hermes = {} if wrong == {"tools": SHORT} else {"tool_parser": "hermes"}
    client, _ = serve("a", **hermes)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            **{"model": "chat", "messages": [{"role": "user", "content": "y"}], **wrong}
        )
    assert refused.value.param == param
