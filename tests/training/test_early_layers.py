"""Layers that learn together with exits, on tiny models of all architectures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import tiny_classifiers

from pliant.cli import exit_training
from pliant.cli.exit_training import Splits
from pliant.models import sources
from pliant.texts import Pair, parts
from pliant.training import early_layers
from pliant.training.early_layers import FRAGMENT_WORDS, Recipe, fragment
from pliant.training.labelled_texts import LabelledText

KINDS = ("bert", "roberta", "electra", "distilbert", "mpnet", "deberta-v2", "modernbert")
OPTIONS = {"electra": {"embedding_size": 24}}  # with fewer it needs longer
RECIPE = Recipe(15, learning_rate=1e-2, exit_learning_rate=1e-2)


def texts(count: int, labels: Sequence[str], seed: int) -> list[LabelledText]:
    """Two of the words tell the label, but only together: a random network hardly lets exits see it."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        one, other = rng.randrange(3), rng.randrange(3)
        words = [f"w{3 + one}", f"w{6 + other}", *(f"w{rng.randrange(9, 40)}" for _ in range(2))]
        made.append(LabelledText(" ".join(rng.sample(words, 4)), labels[(one + other) % 3]))
    return made


def learned(folder: Path, out: Path, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Its weights after training on a few texts."""
    info = sources.describe(folder)
    early_layers.train(folder, info, (1,), texts(40, info.labels, 0), recipe, out, lambda _done: None)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_exits_know_more_behind_layers_that_learned_with_them(kind: str, tmp_path: Path) -> None:
    folder = tiny_classifiers.save_with_words(tmp_path / "model", kind, **OPTIONS.get(kind, {}))
    info = sources.describe(folder)
    splits = Splits(*(texts(count, info.labels, seed) for seed, count in enumerate((300, 150, 200))))
    before, after = (
        exit_training.train(folder, info, (1, 2), splits, 1.0, tmp_path / name, lambda _what, _done: None, recipe)
        for name, recipe in (("as it is", None), ("learned", RECIPE))
    )
    assert before.model_accuracy == before.accuracies[-1] == after.model_accuracy
    assert max(before.accuracies[:2]) < 0.6 < 0.8 < min(after.accuracies[:2])
    assert after.accuracies[-1] != before.accuracies[-1], "the last layer learned, too"


def test_the_model_as_it_was_is_left_alone_and_its_files_go_along(tmp_path: Path) -> None:
    """Also where its weights are in several files: what has learned is in one, and no index tells of others."""
    folder = tiny_classifiers.save_with_words(tmp_path / "model", "bert")
    model = tiny_classifiers.read(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    kept = {file: file.read_bytes() for file in folder.iterdir()}
    learned(folder, tmp_path / "out", Recipe(1))
    assert {file: file.read_bytes() for file in folder.iterdir()} == kept
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert sources.describe(tmp_path / "out") == sources.describe(folder)


def test_the_same_seed_gives_the_same_weights_and_random_numbers_go_on_as_before(tmp_path: Path) -> None:
    folder = tiny_classifiers.save_with_words(tmp_path / "model", "bert")
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, again, other = (
        learned(folder, tmp_path / name, Recipe(1, seed=seed))
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    )
    assert torch.rand(1) == expected
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=20), st.booleans(), st.integers(0, 99))
def test_a_fragment_is_some_words_in_a_row_of_each_part(words: list[str], pair: bool, seed: int) -> None:
    text = Pair(" ".join(words), "x y z") if pair else " ".join(words)
    found = fragment(text, random.Random(seed))
    assert isinstance(found, Pair) == pair
    for part, of in zip(parts(found), parts(text), strict=True):
        assert f" {part} " in f" {of} "
        least, most = FRAGMENT_WORDS
        assert min(least, len(of.split())) <= len(part.split()) <= most
