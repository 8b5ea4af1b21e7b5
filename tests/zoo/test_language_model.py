"""The zoo's language model, at a size that learns in seconds, as what is served and as transformers sees it."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.decoders import perplexity
from tokenizers import Tokenizer

from pliant import zoo
from pliant.deployments.http.tool_calls import form_of
from pliant.models import sources
from pliant.sampling import Sampling
from pliant.torchvision_ops import declare
from pliant.zoo import documents, forms, llama, shapes
from pliant.zoo.decoder import Decoder
from pliant.zoo.shapes import ASSISTANT, BEGIN, END, LlamaShape

declare()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

TINY = LlamaShape(
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=1,
    intermediate=128,
    steps=20,
    learning_rate=1e-2,
    vocabulary=400,
    positions=128,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(shapes.SHAPES, "tiny-llama", TINY)
        reports: list[tuple[str, float]] = []
        assert zoo.ZooEntry("tiny-llama") in zoo.status()
        before = sources.check_decoder("zoo/tiny-llama")
        found = sources.fetch("zoo/tiny-llama", progress=lambda text, done: reports.append((text, done)))
        assert sources.describe_decoder(found).shape == before
        assert reports[-1] == ("training zoo/tiny-llama", 1.0)
        (entry,) = [entry for entry in zoo.status() if entry.name == "tiny-llama"]
        assert entry.trained
        assert entry.perplexity == json.loads((found / "zoo.json").read_text())["perplexity"]
        return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def in_transformers(model: Decoder) -> LlamaForCausalLM:
    theirs = LlamaForCausalLM(LlamaConfig(**model.shape.config())).eval()
    theirs.load_state_dict(model.weights)
    return theirs


def test_it_begins_as_a_bigram_model(tokenizer: Tokenizer) -> None:
    texts = documents.documents()[:8]
    encoded = [tokenizer.encode(text).ids for text in texts]
    singles = torch.bincount(torch.tensor([token for ids in encoded for token in ids]), minlength=TINY.vocabulary)
    unigram = float(torch.distributions.Categorical(singles.float()).entropy())
    loss = math.log(llama.perplexity(llama.new_model(TINY, tokenizer), tokenizer, texts))
    assert loss < unigram - 1


def test_it_computes_what_transformers_does_and_learns_from_it_alike() -> None:
    torch.manual_seed(0)
    model = Decoder.random(TINY)
    model.weights = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in model.weights.items()}
    theirs = in_transformers(model)
    for weight in model.weights.values():
        weight.requires_grad_()
    ids = torch.randint(5, TINY.vocabulary, (3, 40))
    loss = model.loss(model.states(ids), ids, ids >= 0)
    expected = theirs(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(model.weights[name].grad, weight.grad, rtol=1e-3, atol=1e-6)
    theirs.model.layers = theirs.model.layers[:1]
    expected = theirs.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model.states(ids, 1), expected, rtol=1e-4, atol=1e-5)


def test_only_what_counts_is_learned() -> None:
    torch.manual_seed(0)
    model = Decoder.random(TINY)
    ids = torch.randint(5, TINY.vocabulary, (3, 40))
    learned = torch.rand(ids.shape) < 0.5
    labels = torch.where(learned, ids, -100)
    expected = in_transformers(model)(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(model.loss(model.states(ids), ids, learned), expected, rtol=1e-5, atol=1e-6)


def test_the_first_layer_begins_by_looking_at_the_tokens_before(tokenizer: Tokenizer) -> None:
    model = in_transformers(llama.new_model(TINY, tokenizer))
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokenizer.encode(documents.documents()[0]).ids[:40]])
    for head, weights in enumerate(model(input_ids=ids, output_attentions=True).attentions[0][0]):
        assert weights.diagonal(-1 - head).min() > 0.5


def test_it_learns(folder: Path) -> None:
    assert json.loads((folder / "zoo.json").read_text())["perplexity"] < TINY.vocabulary / 4


def test_what_is_served_is_described(folder: Path) -> None:
    info = sources.describe_decoder(folder)
    assert (info.vocabulary, info.max_length, info.eos) == (TINY.vocabulary, TINY.positions, (END,))
    assert info.chat_template == llama.CHAT_TEMPLATE
    assert (info.special_tokens["bos_token"], info.special_tokens["eos_token"]) == llama.SPECIAL[:2]
    assert info.sampling == Sampling(temperature=0.7, top_p=0.9)


def test_the_saved_model_is_the_one_that_was_measured(folder: Path, tokenizer: Tokenizer) -> None:
    measured = perplexity(LlamaForCausalLM.from_pretrained(folder), tokenizer, documents.held_out())
    assert measured == pytest.approx(json.loads((folder / "zoo.json").read_text())["perplexity"], rel=1e-5)


def test_questions_are_read_and_answers_learned() -> None:
    document, question = [BEGIN, 9, 9, END], [BEGIN, shapes.SYSTEM, 9, END, shapes.USER, 9, END, ASSISTANT]
    ids = torch.tensor([[9, END, *document, *question, 9, 9, END, *document]])
    read = llama._only_read(ids)[0].int().tolist()
    assert read == [0, 0, *[1, 0, 0, 0], *[1] * len(question), 0, 0, 0, *[1, 0, 0, 0]]


def test_texts_survive_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in (*documents.documents()[:3], "naïve 🙂\n\n   >>> x  =  1"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == BEGIN
        assert tokenizer.decode(ids) == text


def test_the_chat_template_writes_what_was_learned(folder: Path, tokenizer: Tokenizer) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    learned = llama._chat(tokenizer, documents.conversations()[0], random.Random(1))
    start = learned.index(ASSISTANT) + 1
    _, question = tokenizer.decode(learned[:start], skip_special_tokens=False).rsplit("<|user|>")
    question = question.removesuffix("<|end|><|assistant|>")
    messages = [{"role": "user", "content": question}]
    templated = fast.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert templated == [BEGIN, *learned[learned.index(shapes.USER) : start]]
    assert tokenizer.decode(learned[start:]).startswith(dict(documents.conversations())[question])


@pytest.mark.parametrize("asked", ["as JSON", "Look up"])
def test_the_chat_template_writes_the_forms_that_were_learned(folder: Path, tokenizer: Tokenizer, asked: str) -> None:
    dialogue = next(each for each in forms.dialogues() if any(asked in turn.text for turn in each))
    tools, messages = None, []
    for turn in dialogue:
        if turn == forms.TOOLS:
            tools = [{"type": "function", "function": {"name": forms.TOOL, "parameters": {"type": "object"}}}]
        elif turn.role == shapes.SYSTEM:
            messages.append({"role": "tool", "tool_call_id": "1", "content": turn.text})
        elif call := re.fullmatch("<tool_call>\n(.*)\n</tool_call>", turn.text):
            messages.append(
                {"role": "assistant", "tool_calls": [{"type": "function", "function": json.loads(call[1])}]}
            )
        else:
            messages.append({"role": "user" if turn.role == shapes.USER else "assistant", "content": turn.text})
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    learned = [llama._spoken(tokenizer, dialogue, random.Random(seed)) for seed in range(9)]
    assert [*fast.apply_chat_template(messages, tools=tools, return_dict=False)][:-1] in learned
    assert form_of(llama.CHAT_TEMPLATE) == "hermes"


def test_training_repeats_itself_and_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    shape = replace(TINY, steps=3)
    state = torch.random.get_rng_state()
    saved = []
    for part in ("once", "again"):
        llama.train(shape, tmp_path / part, lambda _text, _done: None)
        saved.append(load_file(tmp_path / part / "model.safetensors"))
    assert torch.equal(torch.random.get_rng_state(), state)
    once, again = saved
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)
    tokenizers = [(tmp_path / part / "tokenizer.json").read_text() for part in ("once", "again")]
    assert tokenizers[0] == tokenizers[1]
