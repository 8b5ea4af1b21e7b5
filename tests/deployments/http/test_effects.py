"""Every parameter that OpenAI's endpoints accept does what it says, on a tiny model that is computed.

The parameters are those of the bodies' own models: one that is new, and in neither of the tables below, fails here.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import httpx
import pytest
import torch
from support import tiny_llm
from support.decoders import logits
from support.scripted import TOKENIZER, ids
from support.tiny_llm import EOS, TinyLlm
from torch import Tensor

from pliant.deployments.http.openai_body import Body, Neutral
from pliant.deployments.http.openai_responses import ResponsesRequest
from pliant.deployments.http.openai_schemas import ChatRequest, CompletionRequest, parsed
from pliant.deployments.llm.token_texts import TokenTexts
from pliant.deployments.serving.outcome import Outcome, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BODIES: dict[str, type[Body]] = {
    "completions": CompletionRequest,
    "chat/completions": ChatRequest,
    "responses": ResponsesRequest,
}
NAMES = {text.text: token for token in range(TOKENIZER.get_vocab_size()) if (text := TokenTexts(TOKENIZER)[token])}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% for tool in tools or () %}"
    "{{ tool.function.name }};{% endfor %}{{ mood }}a:"
)
MESSAGES = [{"role": "user", "content": "sky"}]
PROMPTS = {"completions": "prompt", "chat/completions": "messages", "responses": "input"}
"""What each endpoint calls it."""
GIVEN = {"completions": "u:sky;a:", "chat/completions": MESSAGES, "responses": "sky"}
PLACE = {"type": "object", "properties": {"at": {"enum": ["x", "y"]}}, "required": ["at"]}
SCHEMA = {**PLACE, "additionalProperties": False}
CLOCK = {"name": "clock", "parameters": PLACE}
TALLY = {"name": "tally", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


@dataclass
class Said:
    """An answer, or the events of a stream."""

    status: int
    body: Any
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    prompt_tokens: int = 0


@dataclass
class Api:
    """One endpoint, which is asked greedily and for log probabilities unless it is told otherwise."""

    path: str
    served: TinyLlm
    model: PreTrainedModel

    @cached_property
    def _gateway(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(self.served.app(template=TEMPLATE))

    @property
    def limit(self) -> str:
        return "max_output_tokens" if self.path == "responses" else "max_tokens"

    @property
    def prompt(self) -> str:
        return PROMPTS[self.path]

    async def said(self, drawn: str = "0", **asked: Any) -> Said:
        """What it answers; without a seed answers depend on `drawn`. None leaves a parameter out."""
        logprobs: dict[str, Any] = {"top_logprobs": 2}
        if self.path == "completions":
            logprobs = {"logprobs": 2}
        elif self.path == "chat/completions":
            logprobs["logprobs"] = True
        given = {"model": "chat", self.prompt: GIVEN[self.path], self.limit: 12, "temperature": 0, **logprobs, **asked}
        given = {name: value for name, value in given.items() if value is not None}
        async with httpx.AsyncClient(transport=self._gateway, base_url="http://test/v1", timeout=None) as http:
            answer = await http.post(f"/{self.path}", json=given, headers={"x-request-id": drawn})
        if answer.headers["content-type"].startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
            return self._read_stream([json.loads(event) for event in events])
        body = answer.json()
        if answer.status_code != 200:
            return Said(answer.status_code, body["error"])
        return self._read(body)

    def _read_stream(self, events: list[Any]) -> Said:
        if self.path == "responses":
            parts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        else:
            choices = [choice for event in events for choice in event["choices"]]
            parts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
        assert any(parts)
        return Said(200, events, "".join(parts))

    def _read(self, body: Any) -> Said:
        usage = body["usage"]
        if self.path == "responses":
            said = Said(200, body, prompt_tokens=usage["input_tokens"], finish=body["status"])
            for item in body["output"]:
                if item["type"] == "function_call":
                    said.calls.append((item["name"], item["arguments"]))
                for part in item.get("content", ()):
                    said.text += part["text"]
                    said.tokens += [NAMES[row["token"]] for row in part.get("logprobs") or ()]
            return said
        choice = body["choices"][0]
        said = Said(200, body, finish=choice["finish_reason"], prompt_tokens=usage["prompt_tokens"])
        rows = choice["logprobs"] or {}
        if self.path == "completions":
            said.text, names = choice["text"], rows.get("tokens") or ()
        else:
            message = choice["message"]
            said.text, names = message["content"] or "", [row["token"] for row in rows.get("content") or ()]
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            said.calls = [(call["name"], call["arguments"]) for call in calls]
        said.tokens = [NAMES[name] for name in names]
        return said

    def follow(self, said: Said, edit: Callable[[Tensor, list[int]], Tensor]) -> None:
        """Each token of the answer is the likeliest by logits [vocab] that were edited, behind those before it."""
        prompt = list(ids("u:sky;a:"))
        rows = logits(self.model, [*prompt, *said.tokens[:-1]])[len(prompt) - 1 :]
        assert len(rows) == len(said.tokens) > 0
        for place, (row, token) in enumerate(zip(rows, said.tokens, strict=True)):
            assert int(edit(row.clone(), said.tokens[:place]).argmax()) == token


Effect = Callable[[Api], Awaitable[None]]
PLAIN = [ids(letter)[0] for letter in "abcdef"]
LETTERS = {str(token): 100 for token in PLAIN}
"""A bias by which answers are made of few letters."""


async def model(api: Api) -> None:
    assert (await api.said()).body["model"] == "chat"
    said = await api.said(model="nobody")
    assert (said.status, said.body["code"]) == (404, "model_not_found")


async def prompt(api: Api) -> None:
    other: Any = [{"role": "user", "content": "sea!"}] if api.path == "chat/completions" else "u:sea!;a:"
    said, also = await api.said(), await api.said(**{api.prompt: other})
    assert said.tokens != also.tokens
    assert said.prompt_tokens != also.prompt_tokens
    api.follow(said, lambda row, _: row)


async def most_tokens(api: Api, name: str = "") -> None:
    for most in (3, 7):
        said = await api.said(**{api.limit: None, name or api.limit: most})
        assert len(said.tokens) == most
        assert said.finish in ("length", "incomplete")


async def temperature(api: Api) -> None:
    cold = [await api.said(drawn, temperature=0) for drawn in "12"]
    warm = [await api.said(drawn, temperature=1.5) for drawn in "12"]
    assert cold[0].tokens == cold[1].tokens
    assert len({tuple(said.tokens) for said in (cold[0], *warm)}) == 3


async def top_p(api: Api) -> None:
    await greedy_if(api, top_p=1e-6)


async def greedy_if(api: Api, **filtered: Any) -> None:
    greedy = await api.said()
    assert (await api.said(temperature=1.5)).tokens != greedy.tokens
    assert (await api.said(temperature=1.5, **filtered)).tokens == greedy.tokens


async def top_k(api: Api) -> None:
    await greedy_if(api, top_k=1)


async def min_p(api: Api) -> None:
    await greedy_if(api, min_p=1)


async def typical_p(api: Api) -> None:
    def most_typical(row: Tensor, _: list[int]) -> Tensor:
        chances = row.double().log_softmax(-1)
        return -(chances + (-(chances.exp() * chances).sum())).abs()

    said = await api.said(temperature=1, typical_p=1e-9)
    api.follow(said, most_typical)
    assert said.tokens != (await api.said()).tokens


async def seed(api: Api) -> None:
    said = [await api.said(drawn, temperature=1, seed=seed) for drawn, seed in (("1", 5), ("2", 5), ("3", 6))]
    assert said[0].tokens == said[1].tokens != said[2].tokens


async def n(api: Api) -> None:
    said = await api.said(n=3, temperature=1, seed=1)
    assert [choice["index"] for choice in said.body["choices"]] == [0, 1, 2]
    assert said.tokens == (await api.said(temperature=1, seed=1)).tokens


async def stop(api: Api) -> None:
    whole = await api.said(logit_bias=LETTERS)
    at = whole.text.index(whole.text[-1])
    said = await api.said(logit_bias=LETTERS, stop=whole.text[-1])
    assert (said.text, said.finish) == (whole.text[:at], "stop")


async def stop_token_ids(api: Api) -> None:
    whole = await api.said()
    at = whole.tokens.index(whole.tokens[-1])
    said = await api.said(stop_token_ids=[whole.tokens[-1]])
    assert (said.tokens, said.finish) == (whole.tokens[: at + 1], "stop")
    assert len(said.text) < len(whole.text)


async def ignore_eos(api: Api) -> None:
    ends = {str(EOS): 100}
    said, goes_on = await api.said(logit_bias=ends), await api.said(logit_bias=ends, ignore_eos=True)
    assert (said.tokens, said.finish) == ([EOS], "stop")
    assert (goes_on.tokens, goes_on.finish) == ([EOS] * 12, "length")


async def min_tokens(api: Api) -> None:
    said = await api.said(logit_bias={str(EOS): 100}, min_tokens=4)
    assert said.tokens[4:] == [EOS]
    assert EOS not in said.tokens[:4]


async def bad_words(api: Api) -> None:
    whole = await api.said(logit_bias=LETTERS)
    word = whole.text[4:6]
    said = await api.said(logit_bias=LETTERS, bad_words=[word])
    assert word in whole.text
    assert word not in said.text


async def logit_bias(api: Api) -> None:
    assert (await api.said(logit_bias={str(PLAIN[0]): 100})).text == "a" * 12


async def penalty(api: Api, name: str, edit: Callable[[Tensor, list[int]], Tensor]) -> None:
    """Answers of few letters repeat themselves, and less so with a penalty."""

    def edited(row: Tensor, before: list[int]) -> Tensor:
        row[PLAIN] += 100
        return edit(row, before)

    plain, said = await api.said(logit_bias=LETTERS), await api.said(logit_bias=LETTERS, **{name: 2})
    api.follow(said, edited)
    assert said.tokens != plain.tokens


async def presence_penalty(api: Api) -> None:
    def edit(row: Tensor, before: list[int]) -> Tensor:
        row[list(set(before))] -= 2
        return row

    await penalty(api, "presence_penalty", edit)


async def frequency_penalty(api: Api) -> None:
    def edit(row: Tensor, before: list[int]) -> Tensor:
        return row - 2 * torch.bincount(torch.tensor(before, dtype=torch.int64), minlength=len(row))

    await penalty(api, "frequency_penalty", edit)


async def repetition_penalty(api: Api) -> None:
    def edit(row: Tensor, before: list[int]) -> Tensor:
        seen = list({*ids("u:sky;a:"), *before})
        row[seen] = torch.where(row[seen] > 0, row[seen] / 2, row[seen] * 2)
        return row

    await penalty(api, "repetition_penalty", edit)


async def stream(api: Api) -> None:
    streamed = await api.said(stream=True)
    assert isinstance(streamed.body, list), "events, of as many tokens each as there were when it was read"
    assert streamed.text == (await api.said()).text


async def include_usage(api: Api) -> None:
    events = (await api.said(stream=True, stream_options={"include_usage": True})).body
    assert events[-1]["usage"]["completion_tokens"] == 12
    assert all("usage" not in event for event in (await api.said(stream=True)).body)


async def prompt_logprobs(api: Api) -> None:
    said = await api.said(prompt_logprobs=1)
    places = said.body.get("prompt_logprobs") or said.body["choices"][0]["prompt_logprobs"]
    prompt = ids("u:sky;a:")
    scores = logits(api.model, list(prompt)).log_softmax(-1)
    for place in range(1, len(prompt)):
        own = places[place][str(prompt[place])]
        assert own["logprob"] == pytest.approx(float(scores[place - 1, prompt[place]]), abs=5e-4)


async def logprobs(api: Api) -> None:
    if api.path == "completions":
        rows = (await api.said(logprobs=3)).body["choices"][0]["logprobs"]
        assert all(3 <= len(top) <= 4 for top in rows["top_logprobs"])
        first = max(rows["top_logprobs"][0].values())
        assert (await api.said(logprobs=None)).body["choices"][0]["logprobs"] is None
    else:
        first = (await api.said(top_logprobs=None)).body["choices"][0]["logprobs"]["content"][0]["logprob"]
        assert (await api.said(logprobs=False, top_logprobs=None)).body["choices"][0]["logprobs"] is None
    scores = logits(api.model, list(ids("u:sky;a:")))[-1].log_softmax(-1)
    assert first == pytest.approx(float(scores.max()), abs=5e-4)


async def top_logprobs(api: Api) -> None:
    for most in (0, 3):
        body = (await api.said(top_logprobs=most)).body
        if api.path == "responses":
            rows = body["output"][0]["content"][0]["logprobs"]
        else:
            rows = body["choices"][0]["logprobs"]["content"]
        assert [len(row["top_logprobs"]) for row in rows] == [most] * 12


async def echo(api: Api) -> None:
    said, alone = await api.said(echo=True), await api.said()
    assert said.text == "u:sky;a:" + alone.text
    assert said.tokens == [*ids("u:sky;a:"), *alone.tokens]


async def chat_template_kwargs(api: Api) -> None:
    said, also = await api.said(), await api.said(chat_template_kwargs={"mood": "gay "})
    assert also.prompt_tokens == said.prompt_tokens + 4
    assert also.tokens != said.tokens


async def fits(api: Api, right: Callable[[str], Any], **bound: Any) -> None:
    said = await api.said(**{api.limit: 60, **bound})
    assert said.finish in ("stop", "completed"), said
    assert right(said.text), said
    assert not right((await api.said()).text)


def is_place(text: str) -> bool:
    return text.startswith("{") and json.loads(text)["at"] in ("x", "y")


def is_object(text: str) -> bool:
    return text.startswith("{") and isinstance(json.loads(text), dict)


def is_word(text: str) -> bool:
    return bool(re.fullmatch("[ab]{3}", text))


CLOSES = {"logit_bias": {str(ids("}")[0]): 100}}
"""An object that may have anything has nothing."""


async def response_format(api: Api) -> None:
    if api.path == "responses":
        await fits(api, is_place, text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}})
        return
    await fits(api, is_place, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
    await fits(api, is_object, response_format={"type": "json_object"}, **CLOSES)


async def guided_json(api: Api) -> None:
    await fits(api, is_place, guided_json=SCHEMA)
    await fits(api, is_place, guided_json=json.dumps(SCHEMA))


async def guided_regex(api: Api) -> None:
    await fits(api, is_word, guided_regex="[ab]{3}")


async def guided_choice(api: Api) -> None:
    await fits(api, ("left", "right").__contains__, guided_choice=["left", "right"])


async def guided_grammar(api: Api) -> None:
    await fits(api, "xxy".__eq__, guided_grammar='start: "xx" "y"')


async def structured_json(api: Api) -> None:
    await fits(api, is_place, structured_outputs={"json": SCHEMA})


async def structured_regex(api: Api) -> None:
    await fits(api, is_word, structured_outputs={"regex": "[ab]{3}"})


async def structured_choice(api: Api) -> None:
    await fits(api, ("left", "right").__contains__, structured_outputs={"choice": ["left", "right"]})


async def structured_grammar(api: Api) -> None:
    await fits(api, "xxy".__eq__, structured_outputs={"grammar": 'root ::= "xx" "y"'})


async def structured_object(api: Api) -> None:
    await fits(api, is_object, structured_outputs={"json_object": True}, **CLOSES)


def tools_of(api: Api, *functions: Any) -> list[Any]:
    if api.path == "responses":
        return [{"type": "function", **function} for function in functions]
    return [{"type": "function", "function": function} for function in functions]


async def tools(api: Api) -> None:
    """They are shown to the model, and calls have arguments that fit."""
    plain = await api.said()
    said = await api.said(tools=tools_of(api, CLOCK), tool_choice="required", **{api.limit: 200})
    assert said.prompt_tokens == plain.prompt_tokens + len("clock;")
    assert {name for name, _ in said.calls} == {"clock"}
    assert all(json.loads(arguments)["at"] in ("x", "y") for _, arguments in said.calls[:1])


async def tool_choice(api: Api) -> None:
    both = tools_of(api, CLOCK, TALLY)
    named = {"name": "tally"} if api.path == "responses" else {"function": {"name": "tally"}}
    said = await api.said(tools=both, tool_choice={"type": "function", **named}, **{api.limit: 60})
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == [("tally", {})]
    without = await api.said(tools=both, tool_choice="none")
    assert (without.calls, without.tokens) == ([], (await api.said()).tokens)


async def parallel_tool_calls(api: Api) -> None:
    """An answer is found that has several calls; then it has one."""
    asked: dict[str, Any] = {"tools": tools_of(api, TALLY), "tool_choice": "required", "temperature": 1, api.limit: 200}
    for drawn in map(str, range(40)):
        if len((await api.said(drawn, **asked)).calls) > 1:
            break
    assert len((await api.said(drawn, **asked)).calls) > 1
    assert len((await api.said(drawn, **asked, parallel_tool_calls=False)).calls) == 1


async def instructions(api: Api) -> None:
    said, also = await api.said(), await api.said(instructions="be brief")
    assert also.prompt_tokens == said.prompt_tokens + len("s:be brief;")
    assert also.tokens != said.tokens


async def include(api: Api) -> None:
    asked = {"top_logprobs": None, "include": ["message.output_text.logprobs"]}
    assert len((await api.said(**asked)).tokens) == 12
    assert (await api.said(top_logprobs=None)).tokens == []


async def metadata_of_responses(api: Api) -> None:
    assert (await api.said(metadata={"a": "b"})).body["metadata"] == {"a": "b"}


async def max_completion_tokens(api: Api) -> None:
    await most_tokens(api, "max_completion_tokens")


EFFECTS: dict[str, Effect] = {
    "model": model,
    "prompt": prompt,
    "messages": prompt,
    "input": prompt,
    "max_tokens": most_tokens,
    "max_output_tokens": most_tokens,
    "max_completion_tokens": max_completion_tokens,
    "response_format.type": response_format,
    "response_format.json_schema.schema": response_format,
    "text.format.type": response_format,
    "text.format.schema": response_format,
    "structured_outputs.json": structured_json,
    "structured_outputs.regex": structured_regex,
    "structured_outputs.choice": structured_choice,
    "structured_outputs.grammar": structured_grammar,
    "structured_outputs.json_object": structured_object,
    "stream_options.include_usage": include_usage,
    "metadata of responses": metadata_of_responses,
    **{
        effect.__name__: effect
        for effect in (
            *(temperature, top_p, top_k, min_p, typical_p, seed, n, stop, stop_token_ids, ignore_eos, min_tokens),
            *(bad_words, logit_bias, presence_penalty, frequency_penalty, repetition_penalty, stream, logprobs),
            *(top_logprobs, prompt_logprobs, echo, chat_template_kwargs, guided_json, guided_regex, guided_choice),
            *(guided_grammar, tools, tool_choice, parallel_tool_calls, instructions, include),
        )
    },
}
"""By parameter: what shows that it has the effect that it should."""

IGNORED: dict[str, Any] = {
    "user": "somebody",
    "safety_identifier": "somebody",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "prediction": {"type": "content", "content": "a"},
    "best_of": 1,
    "stream_options.include_obfuscation": True,
    "response_format.json_schema.name": "b",
    "response_format.json_schema.description": "b",
    "response_format.json_schema.strict": True,
    "structured_outputs.disable_fallback": True,
    "text.format.name": "b",
    "text.format.description": "b",
    "text.format.strict": True,
}
"""By parameter that is accepted and changes no answer, as docs/clients.md says: a value of it."""


def parameters(body: type[Body], refused: bool = False, within: str = "") -> Iterator[str]:
    """Those that are accepted; or those of which only what means "without" is."""
    for name, info in body.model_fields.items():
        path = within + (info.alias or name)
        union = get_origin(info.annotation) in (Union, UnionType)
        inner = [kind for kind in (get_args(info.annotation) if union else [info.annotation]) if kind is not NoneType]
        if len(inner) == 1 and isinstance(inner[0], type) and issubclass(inner[0], Body):
            yield from parameters(inner[0], refused, f"{path}.")
        elif refused == (any(isinstance(each, Neutral) for each in info.metadata) or path == "previous_response_id"):
            yield path


def nested(path: str, value: Any) -> dict[str, Any]:
    """The parameter of this path, unless its value is None, with what must be beside it."""
    beside: dict[str, Any] = {}
    if path.startswith("stream_options"):
        beside = {"stream": True}
    *outer, name = path.split(".")
    found: dict[str, Any] = {} if value is None else {name: value}
    if "json_schema" in outer:
        found = {"name": "a", "schema": SCHEMA, **found}
    if outer == ["text", "format"]:
        found = {"type": "json_schema", "name": "a", "schema": SCHEMA, **found}
    if outer == ["structured_outputs"]:
        found = {"regex": "[ab]{3}", **found}
    for each in reversed(outer):
        found = {each: found}
        if each == "json_schema":
            found["type"] = "json_schema"
    return {**found, **beside}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> PreTrainedModel:
    return tiny_llm.save(folder)


@pytest.fixture
async def served(folder: Path, tiny: PreTrainedModel) -> AsyncIterator[TinyLlm]:
    with closing(TinyLlm(folder)) as served:
        yield served


ACCEPTED = [(path, name) for path, body in BODIES.items() for name in parameters(body)]
REFUSED = [(path, name) for path, body in BODIES.items() for name in parameters(body, refused=True)]


@pytest.mark.parametrize(("path", "name"), ACCEPTED)
async def test_every_parameter_has_its_effect(served: TinyLlm, tiny: PreTrainedModel, path: str, name: str) -> None:
    api = Api(path, served, tiny)
    effect = EFFECTS.get(f"{name} of {path}") or EFFECTS.get(name)
    assert effect or name in IGNORED, f"{name} is accepted: say in EFFECTS what it does, or in IGNORED and in the docs"
    if effect:
        await effect(api)
        return
    asked = nested(name, IGNORED[name])
    without = nested(name, None)
    said, plain = await api.said(**asked), await api.said(**without)
    assert said.status == 200, said.body
    assert (said.text, said.tokens) == (plain.text, plain.tokens)


@pytest.mark.parametrize(("path", "name"), REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(path: str, name: str) -> None:
    with pytest.raises(RequestError) as refused:
        parsed(
            BODIES[path], json.dumps({"model": "a", PROMPTS[path]: GIVEN[path], **nested(name, "something")}).encode()
        )
    assert (refused.value.outcome, refused.value.param) == (Outcome.REJECTED, name)


def test_the_tables_name_nothing_else() -> None:
    names = {name for _, name in ACCEPTED}
    assert {name.removesuffix(" of responses") for name in EFFECTS} | IGNORED.keys() == names


def test_what_has_no_effect_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
    table = page.partition("Accepted without effect")[2].partition("\n\nWhat would change")[0]
    named = re.findall(r"(?<!of )`([a-z_]+)`", "\n".join(row.split("|")[1] for row in table.split("\n") if "|" in row))
    assert set(named) == {name.rpartition(".")[2] for name in IGNORED}
