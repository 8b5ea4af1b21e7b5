"""The model of pairs: what it begins as, and that it learns; at the size that is shipped, which takes seconds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pliant import zoo
from pliant.models import sources
from pliant.torchvision_ops import declare
from pliant.zoo import corpus, pairs, shapes
from pliant.zoo.shapes import PairShape, Shape

declare()
from transformers import BertConfig, BertForSequenceClassification  # noqa: E402

BASE = Shape(layers=1, hidden=64, heads=2, epochs=2, learning_rate=5e-3, vocabulary=500, positions=128)
TINY = PairShape("topics-small", hidden=64, steps=60, learning_rate=2e-3, vocabulary=500, positions=128)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def tiny_zoo(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(cache))
    monkeypatch.setitem(shapes.SHAPES, "topics-small", BASE)
    monkeypatch.setitem(shapes.SHAPES, "topics-pairs", TINY)


def test_half_of_all_pairs_suit_each_other_and_none_is_a_text_with_itself() -> None:
    made = pairs.pairs(corpus.held_out(), random.Random(1), 200)
    assert [suits for *_, suits in made] == [True, False] * 200
    for (query, text, _), (again, other, _) in zip(made[::2], made[1::2], strict=True):
        assert query == again
        assert text != other
        assert 1 <= len(query.split()) <= 16


def test_each_head_begins_with_a_text_of_its_own() -> None:
    base = sources.fetch("zoo/topics-small")
    model = BertForSequenceClassification(BertConfig(**TINY.config(), attn_implementation="eager")).eval()
    model.load_state_dict(pairs.new_model(TINY, load_file(base / "model.safetensors")).weights)
    encoding = Tokenizer.from_file(str(base / "tokenizer.json")).encode("a yield expression", "the with statement")
    types = torch.tensor([encoding.type_ids])
    found = model(input_ids=torch.tensor([encoding.ids]), token_type_ids=types, output_attentions=True)
    first, second = found.attentions[0][0, :, 0]
    assert first[types[0] == 0].sum() > 0.9
    assert second[types[0] == 1].sum() > 0.9


def test_it_is_trained_described_and_better_than_a_coin() -> None:
    before = sources.check("zoo/topics-pairs")
    folder = sources.fetch("zoo/topics-pairs")
    assert before == sources.describe(folder)
    assert before.scores_pairs
    assert before.pairs
    assert before.labels == ("related",)
    entry = {entry.name: entry for entry in zoo.status()}["topics-pairs"]
    assert entry.accuracy is not None
    assert entry.accuracy > 0.55
