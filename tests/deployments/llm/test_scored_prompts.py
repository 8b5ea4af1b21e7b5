"""How likely a model finds a prompt, as OpenAI and vLLM say it: with the real client, and a model that computes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import torch
from support import openai_client, tiny_llm
from support.decoders import logits
from support.scripted import TOKENIZER, Replica, Replicas, ids
from support.tiny_llm import TinyLlm
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from pliant.deployments.http.openai_answers import CompletionShape, Echo
from pliant.deployments.llm import generations
from pliant.deployments.llm.request import Piece, TokenLogprobs
from pliant.deployments.llm.token_texts import TokenTexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR = 5e-4
TEXTS = ["Is the sky blue? yes", "é"]
LONG = "The sky is blue. " * 9
TOKENS = {text.text: token for token in range(TOKENIZER.get_vocab_size()) if (text := TokenTexts(TOKENIZER)[token])}
MANY = ["seven c"] * 4
ASKED: dict[str, Any] = {"model": "chat", "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return tiny_llm.save(folder)


@pytest.fixture
async def served(folder: Path, model: PreTrainedModel) -> AsyncIterator[TinyLlm]:
    with closing(TinyLlm(folder, ("a", "b"))) as served:
        yield served


def likely(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """How likely each of these is but the first."""
    scores = logits(model, tokens)[:-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0]


def check(model: PreTrainedModel, choice: Any, text: str, alternatives: int) -> None:
    """This choice echoes `text`, and scores all its tokens."""
    assert choice.text.startswith(text)
    found = choice.logprobs
    tokens = [TOKENS[name] for name in found.tokens]
    assert tokens[: len(ids(text))] == list(ids(text))
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    torch.testing.assert_close(torch.tensor(found.token_logprobs[1:]), likely(model, tokens), atol=NEAR, rtol=0)
    for name, chance, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert top[name] == chance
        assert max(alternatives, 1) <= len(top) <= alternatives + 1
        assert max(top.values()) >= chance
    if text.isascii():
        assert found.text_offset[: len(text)] == [*range(len(text))]
    assert len(found.text_offset) == len(tokens)


def with_a_space_before_texts() -> Tokenizer:
    """As Llama 2 has it: a space before the first word, which decoding leaves out, and a token that begins a text."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Q", "?", "▁a", "▁b", "Q", "a", "b"]
    merges = [("▁", "Q"), ("▁", "a"), ("▁", "b")]
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    made.add_special_tokens(["<unk>", "<s>"])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.mark.parametrize(
    ("special", "as_ids", "text", "offsets"),
    [
        (False, False, "Q a? b", [0, 1, 3, 4]),
        (True, False, "Q a? b", [0, 0, 1, 3, 4]),
        (False, True, "Q a? b", [0, 1, 3, 4]),
        (True, True, "<s> Q a? b", [0, 3, 5, 7, 8]),
    ],
)
def test_tokens_begin_where_the_echoed_text_has_them(
    special: bool, as_ids: bool, text: str, offsets: list[int]
) -> None:
    tokenizer = with_a_space_before_texts()
    first, *others = tokenizer.encode("Q a? b", add_special_tokens=special).ids
    if as_ids:
        assert tokenizer.decode([first, *others], skip_special_tokens=False) == text
    scored = tuple(TokenLogprobs(token, -1.0, (), ()) for token in others)
    answer = Piece((others[-1],), " b", scored[-1:], "length", prompt_logprobs=scored)
    choice = CompletionShape(TokenTexts(tokenizer), [Echo(text, first)], 0).choice(0, answer)
    assert choice["logprobs"]["text_offset"] == [*offsets, len(text)]
    assert choice["text"][len(text) :] == " b"


def test_a_prompt_that_ends_within_a_character_shifts_no_token() -> None:
    tokenizer = with_a_space_before_texts()
    first, *others = tokenizer.encode("Q é").ids[:-1]
    text = tokenizer.decode([first, *others], skip_special_tokens=False)
    scored = tuple(TokenLogprobs(token, -1.0, (), ()) for token in others)
    choice = CompletionShape(TokenTexts(tokenizer), [Echo(text, first)], 0).choice(
        0, Piece((), "", (), "length", prompt_logprobs=scored)
    )
    assert text.startswith("<s> Q")
    assert choice["logprobs"]["text_offset"][:3] == [0, 3, 5]


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("alternatives", [0, 3])
async def test_echo_scores_prompts(served: TinyLlm, model: PreTrainedModel, max_tokens: int, alternatives: int) -> None:
    prompts = [*TEXTS, LONG]
    answer = await served.client().completions.create(
        **ASKED, prompt=prompts, echo=True, logprobs=alternatives, max_tokens=max_tokens
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, text in zip(answer.choices, prompts, strict=True):
        check(model, choice, text, alternatives)
        assert choice.logprobs
        assert len(choice.logprobs.tokens or ()) <= len(ids(text)) + max_tokens
        if not max_tokens:
            assert (choice.text, choice.finish_reason) == (text, "length")
    assert answer.usage
    assert answer.usage.prompt_tokens == sum(len(ids(text)) for text in prompts)
    assert answer.usage.completion_tokens <= 3 * max_tokens


async def test_evaluation_harnesses_find_the_likelihood_of_choices(served: TinyLlm, model: PreTrainedModel) -> None:
    """As lm-evaluation-harness asks for it and reads it: token ids, one token of an answer, and that left out."""
    context, continuations = "Is the sky blue? ", ["yes", "no", "perhaps not"]
    prompts = [[*ids(context + one)] for one in continuations]
    answer = await served.client().completions.create(
        **ASKED, prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1234
    )
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.logprobs
        chances, tops = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
        begin = len(ids(context))
        total = float(likely(model, prompt)[begin - 1 :].sum())
        assert sum(chances[begin:-1]) == pytest.approx(total, abs=1e-2)
        names = (choice.logprobs.tokens or [])[begin:-1]
        greedy = all(max(top, key=top.__getitem__) == name for name, top in zip(names, tops[begin:-1], strict=True))
        best = logits(model, prompt)[begin - 1 : -1].argmax(-1).tolist()
        assert greedy == (best == prompt[begin:])


async def test_prompt_logprobs_are_those_of_vllm(served: TinyLlm, model: PreTrainedModel) -> None:
    """By place and token id, with ranks; computed for one of three choices."""
    extra = {"prompt_logprobs": 2}
    answer = await served.client().completions.create(
        **ASKED, prompt=[LONG, "é"], n=3, max_tokens=2, logprobs=0, extra_body=extra
    )
    for choice, text in zip(answer.choices, [*[LONG] * 3, *["é"] * 3], strict=True):
        places(model, getattr(choice, "prompt_logprobs"), ids(text), 2)  # noqa: B009  # not of OpenAI
        assert choice.logprobs
        assert len(choice.logprobs.tokens or ()) <= 2
    assert [one.prompt_logprobs for one in sorted(served.asked, key=lambda one: int(one.id[-1]))] == [
        *(2, None, None),
        *(2, None, None),
    ]
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_of_a_chat_they_are_beside_the_choices(served: TinyLlm, model: PreTrainedModel) -> None:
    messages: Any = [{"role": "user", "content": "y"}]
    answer = await served.client().chat.completions.create(
        **ASKED, messages=messages, n=2, max_tokens=2, extra_body={"prompt_logprobs": 0}
    )
    prompt = tuple(TOKENIZER.encode("u:y</s>a:").ids)
    places(model, getattr(answer, "prompt_logprobs"), prompt, 0)  # noqa: B009


def places(model: PreTrainedModel, found: Any, prompt: tuple[int, ...], alternatives: int) -> None:
    assert found[0] is None
    chances = likely(model, list(prompt)).tolist()
    scores = logits(model, list(prompt)).log_softmax(-1)
    assert len(found) == len(prompt)
    for place, (token, chance) in enumerate(zip(prompt[1:], chances, strict=True), 1):
        [own, *others] = found[place].items()
        assert own[0] == str(token)
        assert own[1]["logprob"] == pytest.approx(chance, abs=NEAR)
        assert TOKENS[own[1]["decoded_token"]] == token
        assert own[1]["rank"] >= 1
        assert alternatives - 1 <= len(others) <= alternatives
        for name, told in others:
            assert told["logprob"] == pytest.approx(float(scores[place - 1, int(name)]), abs=NEAR)
            assert told["rank"] in (1, 2)


async def test_streams_say_the_same(served: TinyLlm) -> None:
    asked: dict[str, Any] = {**ASKED, "prompt": TEXTS, "echo": True, "logprobs": 2, "max_tokens": 5, "n": 2}
    client = served.client()
    whole = await client.completions.create(**asked)
    parts: list[list[Any]] = [[] for _ in whole.choices]
    async for chunk in await client.completions.create(**asked, stream=True):
        parts[chunk.choices[0].index].append(chunk.choices[0])
    for choice, chunks in zip(whole.choices, parts, strict=True):
        assert "".join(chunk.text for chunk in chunks) == choice.text
        assert choice.logprobs
        for name, values in choice.logprobs.model_dump().items():
            assert [value for chunk in chunks for value in getattr(chunk.logprobs, name)] == close(values)


def close(values: Any) -> Any:
    """To these, but for the rounding of another batch."""
    if isinstance(values, list):
        return [close(value) for value in values]
    if isinstance(values, dict):
        return {name: close(value) for name, value in values.items()}
    return pytest.approx(values, abs=NEAR) if isinstance(values, float) else values


@pytest.mark.parametrize("dies_after", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_dies_is_not_noticed(served: TinyLlm, dies_after: int, stream: bool) -> None:
    """Before the first piece the prompt is computed again for its scores, and after it, they are not told twice."""
    asked: dict[str, Any] = {**ASKED, "prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 30}
    client = served.client()
    whole = (await client.completions.create(**asked)).choices[0]
    served.dies_after = dies_after
    answer = await client.completions.create(**asked, stream=stream)
    choices = [chunk.choices[0] async for chunk in answer] if stream else [answer.choices[0]]
    assert len(served.asked) > 2, "one died"
    assert "".join(choice.text for choice in choices) == whole.text
    assert [name for choice in choices for name in choice.logprobs.tokens] == whole.logprobs.tokens
    assert [one for choice in choices for one in choice.logprobs.token_logprobs] == close(whole.logprobs.token_logprobs)


@pytest.mark.parametrize("max_tokens", [0, 12])
def test_a_stream_that_goes_on_says_nothing_twice(folder: Path, model: PreTrainedModel, max_tokens: int) -> None:
    asked = {**ASKED, "prompt": "a sky", "echo": True, "logprobs": 1, "max_tokens": max_tokens, "stream": True}

    async def events(after: str | None = None) -> list[tuple[str, Any]]:
        with closing(TinyLlm(folder)) as served:
            headers = {"last-event-id": after} if after else {}
            async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app()), base_url="http://t") as http:
                answer = await http.post("/v1/completions", json=asked, headers=headers)
        found = [event.split("\nid: ") for event in answer.text.split("\n\n") if "id: " in event]
        return [(id, json.loads(data.removeprefix("data: "))["choices"][0]) for data, id in found]

    def said(choices: list[tuple[str, Any]]) -> tuple[str, list[str]]:
        return "".join(one["text"] for _, one in choices), [
            name for _, one in choices for name in one["logprobs"]["tokens"]
        ]

    whole = asyncio.run(events())
    had, id = whole[:1], whole[0][0]
    text, names = said([*had, *asyncio.run(events(id))])
    assert (text, names) == said(whole)
    assert text.startswith("a sky")


@pytest.mark.parametrize(
    ("path", "wrong", "param", "reason"),
    [
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not with stream: true"),
        ("completions", {"echo": True, "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ("completions", {"max_tokens": 0, "logprobs": 1}, "max_tokens", "send echo or prompt_logprobs"),
        ("chat/completions", {"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens", "greater than or equal to 1"),
        (
            "completions",
            {"prompt": MANY, "prompt_logprobs": 20},
            "prompt_logprobs",
            "at most 100 are allowed: send fewer",
        ),
        ("completions", {"prompt": MANY, "n": 2, "echo": True, "logprobs": 1}, "logprobs", "112 log probabilities"),
    ],
)
async def test_what_is_too_much_is_refused(
    served: TinyLlm, monkeypatch: pytest.MonkeyPatch, path: str, wrong: dict[str, Any], param: str, reason: str
) -> None:
    monkeypatch.setattr(generations, "_MOST_SCORES", 100)
    good = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app()), base_url="http://t") as http:
        answer = await http.post(f"/v1/{path}", json={**ASKED, **good, **wrong})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]


async def test_a_replica_that_does_not_know_of_it_gives_no_wrong_scores(tmp_path: Path) -> None:
    client = openai_client.connect(tmp_path, Replicas(a=Replica(gives=[Piece(ids("a"), "a", (), "stop")])))
    with pytest.raises(openai.InternalServerError, match="does not compute log probabilities of prompts yet"):
        await client.completions.create(**ASKED, prompt="a", echo=True, logprobs=1)
