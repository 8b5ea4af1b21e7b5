"""From labelled texts to a service whose texts leave early."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny_classifiers
from tokenizers import Tokenizer
from typer.testing import CliRunner

from pliant.cli import command, exit_training
from pliant.cli.exit_training import Splits, Trained
from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.messages import Answer, Query
from pliant.deployments.encoder.runtimes import ModelRuntimes
from pliant.errors import ModelError
from pliant.kernels.encoder.eager_classifier import EagerClassifier
from pliant.models import encoder_exits, sources
from pliant.models.revision import revision
from pliant.texts import Pair
from pliant.training.early_layers import Recipe
from pliant.training.labelled_texts import LabelledText

KINDS = 3


@pytest.fixture
def folder(encoder_backend: str, tmp_path: Path) -> Path:
    return tiny_classifiers.save_with_words(tmp_path / "model", "bert")


def texts(count: int, labels: tuple[str, ...], seed: int) -> list[LabelledText]:
    """Words of each label are its own, so that any layer can tell; the untrained model cannot."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        label = index % KINDS
        words = (f"w{3 + label + KINDS * rng.randrange(30)}" for _ in range(rng.randint(8, 12)))
        made.append(LabelledText(" ".join(words), labels[label]))
    return made


def train(folder: Path, out: Path, after: tuple[int, ...] = (1, 2)) -> Trained:
    info = sources.describe(folder)
    splits = Splits(*(texts(count, info.labels, seed) for seed, count in enumerate((300, 100, 100))))
    return exit_training.train(folder, info, after, splits, 0.0, out, lambda _what, _done: None)


async def test_texts_leave_where_the_trained_exits_are_sure(folder: Path, tmp_path: Path) -> None:
    found = train(folder, tmp_path / "out")
    assert found.accuracies[0] > 0.8 > found.accuracies[-1]
    assert found.accuracy >= found.accuracies[-1]
    assert encoder_exits.read(tmp_path / "out").after == (1, 2)
    config = EncoderConfig(kind="encoder", model=str(tmp_path / "out"), replicas=1, exits=True)
    engine = Engine(ModelRuntimes(config))
    await engine.hold(128)
    ids = np.array([3, 6, 9, 12, 15, 18, 21], "<i4")
    answers = await asyncio.gather(*(engine.infer(Query(ids.tobytes(), len(ids), None, 1.0)) for _ in range(3)))
    for answer in answers:
        assert isinstance(answer, Answer)
        assert np.frombuffer(answer.logits, "<f4").argmax() == 0
    assert engine.report()["layers"] == {1: 3}


def test_the_folder_with_exits_is_a_model_of_its_own(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "one", (1,))
    train(folder, tmp_path / "two", (2,))
    assert len({revision(each) for each in (folder, tmp_path / "one", tmp_path / "two")}) == 3


def test_exits_learn_from_pairs(folder: Path, tmp_path: Path) -> None:
    """Their types count: the whole model says of them what it says in a service."""
    info = sources.describe(folder)

    def paired(text: LabelledText) -> LabelledText:
        words = str(text.text).split()
        return text._replace(text=Pair(" ".join(words[:4]), " ".join(words[4:])))

    splits = Splits(*(list(map(paired, texts(count, info.labels, seed))) for seed, count in enumerate((300, 100, 100))))
    found = exit_training.train(folder, info, (1, 2), splits, 0.0, tmp_path / "out", lambda _what, _done: None)
    assert found.accuracies[0] > 0.8 > found.accuracies[-1]
    model = EagerClassifier(folder, device="cpu", dtype="float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    right = 0
    for (first, second), label in splits.choose:
        encoding = tokenizer.encode(first, second)
        said = model.unpadded(torch.tensor(encoding.ids), torch.tensor(encoding.type_ids) if info.pairs else None)
        right += info.labels[int(said.argmax())] == label
    assert found.accuracies[-1] == pytest.approx(right / len(splits.choose), abs=0.011)


def test_layers_that_the_model_does_not_have(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"must rise from 0 to 2; got \[2, 3\]"):
        train(folder, tmp_path / "out", (2, 3))
    assert not (tmp_path / "out").exists()


def run(folder: Path, out: Path, *options: str) -> tuple[int, str]:
    """The exit code, and all that a person is told."""
    labels = sources.describe(folder).labels
    for seed, (name, count) in enumerate((("train", 300), ("data", 200))):
        lines = (json.dumps({"text": text.text, "label": text.label}) for text in texts(count, labels, seed))
        (folder.parent / name).write_text("\n".join(lines))
    given = ("--train", str(folder.parent / "train"), "--data", str(folder.parent / "data"), "--after", "1,2")
    result = CliRunner().invoke(command.app, ["train-exits", str(folder), str(out), *given, *options])
    return result.exit_code, " ".join(f"{result.output} {result.exception or ''}".split())


def test_the_command_says_what_exits_do_and_how_to_serve_them(folder: Path, tmp_path: Path) -> None:
    code, told = run(folder, tmp_path / "out", "--accuracy-loss", "0")
    assert code == 0
    assert re.search(r"│ 1 │ \d+\.\d% │ \d+% │ │ 2 │ .* │ all │", told)
    assert f"model: {(tmp_path / 'out').resolve()}, exits: true" in told
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    code, told = run(folder, tmp_path / "out")
    assert code == 1
    assert "is there already; choose a folder that is not" in told


def test_the_command_has_layers_learn_as_it_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[Recipe] = []
    train_layers = exit_training.early_layers.train

    def recorded(*given: object) -> None:
        learned.extend(one for one in given if isinstance(one, Recipe))
        train_layers(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(exit_training.early_layers, "train", recorded)
    code, _ = run(folder, tmp_path / "out", "--epochs", "2", "--fragments", "3", "--lr", "0.001")
    assert code == 0
    assert learned == [Recipe(epochs=2, fragments=3, learning_rate=0.001)]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()
    code, told = run(folder, tmp_path / "other", "--after", "some")
    assert code == 1
    assert "--after: got some; must be numbers of layers, such as 2,4" in told
