"""From labelled texts to a service whose texts leave early."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support import tiny_classifiers
from tokenizers import Tokenizer

from pliant.cli import exit_training
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
