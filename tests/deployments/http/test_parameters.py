"""Every parameter of OpenAI's text endpoints that is accepted changes what a computed model answers, as it says."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from support.scripted import MAX_LENGTH, TOKENIZER, Replica, Replicas, ids, language_model

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.openai_body import Neutral
from pliant.deployments.http.openai_schemas import ChatRequest, CompletionRequest
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.kind import LlmKind
from pliant.deployments.llm.loop import EngineLoop
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.serving.services import Services
from pliant.kernels.decoder import executor
from pliant.torchvision_ops import declare

Json = dict[str, Any]
EOS = TOKENIZER.token_to_id("</s>")
A = ids("a")[0]
WARM: Json = {"temperature": 1.5, "seed": 1}
ENDS: Json = {"logit_bias": {str(EOS): 100}}
SAYS_A: Json = {"logit_bias": {str(A): 100}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ more }}{{ tools | length if tools else '' }}:"
FUNCTION: Json = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: Json = {"tools": [{"type": "function", "function": FUNCTION}]}
CALLED: Json = {**TOOLS, "tool_choice": "required", "max_tokens": 40}
A_SCHEMA: Json = {"enum": ["abc"]}


class Answer(NamedTuple):
    """To a completion or a chat."""

    body: Json
    kind: str

    @property
    def text(self) -> str:
        choice = self.body["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def tokens(self) -> int:
        return int(self.body["usage"]["completion_tokens"])

    @property
    def choice(self) -> Json:
        found: Json = self.body["choices"][0]
        return found

    @property
    def calls(self) -> list[Json]:
        found: list[Json] = self.choice["message"].get("tool_calls", [])
        return found


class Case(NamedTuple):
    """With the parameter, and without it, `beside` the same others; and what differs."""

    value: Any
    differs: Callable[[Answer, Answer], bool]
    beside: Mapping[str, Any] = MappingProxyType({})
    chat: bool = False


def other(given: Answer, without: Answer) -> bool:
    return given.text != without.text


def says(text: str) -> Callable[[Answer, Answer], bool]:
    return lambda given, without: given.text == text != without.text


def ends_sooner(given: Answer, without: Answer) -> bool:
    return (given.choice["finish_reason"], without.choice["finish_reason"]) == ("tool_calls", "length")


CASES: dict[str, Case] = {
    "max_tokens": Case(3, lambda given, _: given.tokens == 3),
    "max_completion_tokens": Case(3, lambda given, _: given.tokens == 3, {"max_tokens": None}, chat=True),
    "temperature": Case(1.5, other, {"temperature": 0, "seed": 1}),
    "top_p": Case(1e-6, other, WARM),
    "top_k": Case(1, other, WARM),
    "min_p": Case(1.0, other, WARM),
    "typical_p": Case(1e-6, other, WARM),
    "seed": Case(2, other, WARM),
    "n": Case(3, lambda given, _: len({each["text"] for each in given.body["choices"]}) == 3, WARM),
    "stop": Case("aa", lambda given, _: given.text == "" and given.choice["finish_reason"] == "stop", SAYS_A),
    "ignore_eos": Case(True, lambda given, without: (given.tokens, without.tokens) == (12, 1), ENDS),
    "stream": Case(True, lambda given, _: given.kind.startswith("text/event-stream")),
    "stream_options": Case({"include_usage": True}, lambda given, _: given.body["usage"] is not None, {"stream": True}),
    "presence_penalty": Case(2, other, {**WARM, "max_tokens": 40}),
    "frequency_penalty": Case(2, other, SAYS_A | {"logit_bias": {str(A): 8}}),
    "repetition_penalty": Case(50, other, SAYS_A | {"logit_bias": {str(A): 8}}),
    "logit_bias": Case({str(A): 100}, says("a" * 12)),
    "stop_token_ids": Case([A], says(""), SAYS_A),
    "min_tokens": Case(5, lambda given, without: (given.tokens, without.tokens) == (6, 1), ENDS),
    "bad_words": Case(["a"], lambda given, _: "a" not in given.text, SAYS_A),
    "response_format": Case(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": A_SCHEMA}}, says('"abc"'), {"max_tokens": 40}
    ),
    "structured_outputs": Case({"choice": ["abc"]}, says("abc")),
    "guided_json": Case(A_SCHEMA, says('"abc"')),
    "guided_regex": Case("ab+c", lambda given, _: given.text.startswith("ab")),
    "guided_choice": Case(["abc"], says("abc")),
    "guided_grammar": Case('start: "abc"', says("abc")),
    "logprobs": Case(2, lambda given, _: len(given.choice["logprobs"]["top_logprobs"]) == 12),
    "top_logprobs": Case(
        3, lambda given, _: len(given.choice["logprobs"]["content"][0]["top_logprobs"]) == 3, {"logprobs": True}, True
    ),
    "echo": Case(True, lambda given, without: given.text == "hello" + without.text),
    "tools": Case(TOOLS["tools"], other, chat=True),
    "tool_choice": Case("required", lambda given, _: len(given.calls) >= 1, {**TOOLS, "max_tokens": 40}, chat=True),
    "parallel_tool_calls": Case(
        False, ends_sooner, {**CALLED, "logit_bias": {str(token): 100 for token in ids(",}")}}, chat=True
    ),
    "chat_template_kwargs": Case({"more": "more"}, other, chat=True),
}
NO_EFFECT: Json = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "prediction": {"type": "content", "content": "x"},
    "best_of": 1,
}
"""What hosted services or clients send: accepted, without effect."""
NEEDED = {"model", "prompt", "messages"}


def test_each_parameter_that_is_accepted_has_a_case() -> None:
    accepted = {
        name
        for model in (CompletionRequest, ChatRequest)
        for name, field in model.model_fields.items()
        if not any(isinstance(each, Neutral) for each in field.metadata)
    }
    assert accepted == CASES.keys() | NO_EFFECT.keys() | NEEDED


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a random model whose tokens are bytes."""
    declare()
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("weights")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "initializer_range": 0.2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": MAX_LENGTH}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, **heads, vocab_size=TOKENIZER.get_vocab_size(), eos_token_id=EOS)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Computed(Replicas):
    """One replica that computes."""

    def __init__(self, loop: EngineLoop) -> None:
        super().__init__(a=Replica())
        self._loop = loop

    async def pieces(self, parcel: Parcel[Generation]) -> AsyncGenerator[Piece | Refusal | Alive, None]:
        [generation] = parcel.queries
        async with aclosing(self._loop.generate(generation)) as pieces:
            async for piece in pieces:
                yield piece or Alive()


@pytest.fixture
async def client(weights: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    loop = EngineLoop(Engine(executor.load(weights, slots=4), TOKENIZER, (EOS,), queue=16, stall_s=0.1))
    try:
        model = language_model(tmp_path, Computed(loop), template=TEMPLATE, tool_parser="hermes")
        services, config = Services.of("prompts", {"chat": model}), GatewayConfig()
        app = application(config, services, dict, bytes, LlmKind().routers(services, None, config))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1") as client:
            yield client
    finally:
        loop.close()


async def ask(client: httpx.AsyncClient, chat: bool, given: Mapping[str, Any]) -> Answer:
    asked: Json = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
    body = {"model": "chat", "max_tokens": 12, "temperature": 0, **asked, **given}
    response = await client.post("chat/completions" if chat else "completions", json=body)
    assert response.status_code == 200, response.text
    kind = response.headers["content-type"]
    if not kind.startswith("text/event-stream"):
        return Answer(response.json(), kind)
    *_, last, _done, _end = response.text.split("\n\n")
    last = json.loads(last.partition("\nid:")[0].removeprefix("data: "))
    return Answer({"usage": None, **last}, kind)


@pytest.mark.parametrize("name", CASES)
async def test_its_effect_is_real(client: httpx.AsyncClient, name: str) -> None:
    case = CASES[name]
    beside = {key: value for key, value in case.beside.items() if key != name}
    given = await ask(client, case.chat, {**case.beside, name: case.value})
    without = await ask(client, case.chat, case.beside if name == "temperature" else beside)
    assert case.differs(given, without), (given, without)


@pytest.mark.parametrize("name", NO_EFFECT)
async def test_it_is_accepted_without_effect(client: httpx.AsyncClient, name: str) -> None:
    chat = name not in CompletionRequest.model_fields
    without = await ask(client, chat, {})
    assert (await ask(client, chat, {name: NO_EFFECT[name]})).text == without.text
