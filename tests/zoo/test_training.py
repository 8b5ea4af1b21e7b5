"""The training loop and what it writes, at a size that learns in seconds."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pliant import zoo
from pliant.kernels.encoder import packed_runtime
from pliant.models import sources
from pliant.torchvision_ops import declare
from pliant.zoo import corpus, library, shapes, topics
from pliant.zoo.encoder import Encoder
from pliant.zoo.shapes import Shape

declare()
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification  # noqa: E402

TINY = Shape(layers=3, hidden=64, heads=2, epochs=4, learning_rate=5e-3, vocabulary=500, positions=128)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def tiny_zoo(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(cache))
    monkeypatch.setitem(shapes.SHAPES, "topics-small", TINY)


def test_fetch_trains_once_and_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    assert zoo.status()[0] == zoo.ZooEntry("topics-small")
    reports: list[tuple[str, float]] = []
    folder = sources.fetch("zoo/topics-small", progress=lambda text, done: reports.append((text, done)))
    assert {"config.json", "model.safetensors", "tokenizer.json", "zoo.json"} <= {
        file.name for file in folder.iterdir()
    }
    fractions = [done for _, done in reports]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert all("topics-small" in text for text, _ in reports)

    reports.clear()
    assert sources.fetch("zoo/topics-small", progress=lambda text, done: reports.append((text, done))) == folder
    assert not reports


def test_the_card_and_the_status_tell_what_was_measured() -> None:
    folder = sources.fetch("zoo/topics-small")
    card = json.loads((folder / "zoo.json").read_text())
    assert card["version"] == shapes.SHAPES["topics-small"].version
    assert card["accuracy"] > 0.4
    assert zoo.status()[0] == zoo.ZooEntry("topics-small", card["accuracy"], None, card["parameters"], card["seconds"])


def test_the_saved_model_and_tokenizer_are_those_that_were_measured() -> None:
    folder = sources.fetch("zoo/topics-small")
    model = Encoder.load(TINY, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(TINY.positions)
    card = json.loads((folder / "zoo.json").read_text())
    assert topics.accuracy(model, tokenizer, corpus.held_out(), TINY.labels) == card["accuracy"]


def test_it_computes_what_transformers_does() -> None:
    torch.manual_seed(0)
    model = Encoder.random(TINY)
    model.weights = {name: weight + 0.1 * torch.randn_like(weight) for name, weight in model.weights.items()}
    theirs = BertForSequenceClassification(BertConfig(**TINY.config())).eval()
    theirs.load_state_dict(model.weights)
    ids, types = torch.randint(5, TINY.vocabulary, (3, 20)), (torch.arange(20) > 8).long().expand(3, 20)
    mask = (torch.arange(20) < torch.tensor([[20], [12], [5]])).long()
    found = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    torch.testing.assert_close(model.logits(ids, mask, types), found, rtol=1e-4, atol=1e-5)
    theirs.bert.encoder.layer = theirs.bert.encoder.layer[-1:]
    found = theirs(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(model.logits(ids, mask, skipped=TINY.layers - 1), found, rtol=1e-4, atol=1e-5)


def test_transformers_reads_what_was_saved() -> None:
    folder = sources.fetch("zoo/topics-small")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.mask_token, tokenizer.model_max_length) == ("[MASK]", TINY.positions)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    given = tokenizer("The yield expression", return_tensors="pt")
    assert tokenizer.convert_ids_to_tokens(given["input_ids"][0])[0] == "[CLS]"
    ours = Encoder.load(TINY, folder).logits(given["input_ids"], given["attention_mask"])
    torch.testing.assert_close(ours, model(**given).logits, rtol=1e-4, atol=1e-5)


def test_it_learns_to_tell_what_adapters_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TINY, epochs=2, windows=0, labels=library.LABELS)
    monkeypatch.setitem(shapes.SHAPES, "library", shape)
    assert sources.describe(sources.fetch("zoo/library")).labels == library.LABELS
    [entry] = [entry for entry in zoo.status() if entry.name == "library"]
    most = max(Counter(text.label for text in library.held_out()).values()) / len(library.held_out())
    assert (entry.accuracy or 0.0) > most


def test_what_is_known_before_training_holds_after_it() -> None:
    before = sources.check("zoo/topics-small")
    assert before == sources.describe(sources.fetch("zoo/topics-small"))
    assert before.max_length == TINY.positions


def test_the_tokenizer_lowercases_frames_and_does_not_truncate() -> None:
    tokenizer = Tokenizer.from_file(str(sources.fetch("zoo/topics-small") / "tokenizer.json"))
    assert tokenizer.encode("The FOR statement").tokens == tokenizer.encode("the for statement").tokens
    assert tokenizer.encode("the").tokens == ["[CLS]", "the", "[SEP]"]
    assert len(tokenizer.encode("the " * 1000).ids) == 1002


def test_training_repeats_itself_and_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    topics.train(TINY, tmp_path, lambda _text, _done: None)
    assert torch.equal(torch.random.get_rng_state(), state)
    once = load_file(sources.fetch("zoo/topics-small") / "model.safetensors")
    again = load_file(tmp_path / "model.safetensors")
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_an_interrupted_training_leaves_nothing_that_looks_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))

    def interrupt(_text: str, done: float) -> None:
        if done > 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.fetch("zoo/topics-small", progress=interrupt)
    assert zoo.status()[0].accuracy is None
    assert sources.fetch("zoo/topics-small").exists()


def test_the_embedding_shares_its_model_s_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "topics-embedding", shapes.EmbeddingShape("topics-small", "cls_token"))
    before = sources.check("zoo/topics-embedding")
    folder, model = sources.fetch("zoo/topics-embedding"), sources.fetch("zoo/topics-small")
    assert before == sources.describe(folder)
    assert (before.task, before.dimensions, before.normalized) == ("embed", TINY.hidden, True)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (folder / file).samefile(model / file)
    text = "The yield expression is used when defining a generator function"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    states = BertForSequenceClassification.from_pretrained(model).eval().bert(torch.tensor([ids]))
    wanted = torch.nn.functional.normalize(states.last_hidden_state[0, 0], dim=0)
    found = packed_runtime.load(folder, TINY.positions)(ids)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=1e-5)
    entry = {entry.name: entry for entry in zoo.status()}["topics-embedding"]
    assert entry.trained
    assert entry.seconds < 1
