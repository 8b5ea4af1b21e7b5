"""From labelled texts to a model's folder with exits: heads are trained, calibrated, and given a cut-off.

All layers may learn with them before that (`early_layers`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pliant.errors import ModelError
from pliant.kernels.encoder import packed_runtime
from pliant.kernels.encoder.exits import Batch, Exits
from pliant.models import encoder_exits, hub
from pliant.models.encoder_exits import ExitsInfo
from pliant.models.encoder_info import EncoderInfo
from pliant.models.encoder_tokenizer import encoder_tokenizer
from pliant.policies.cascade.calibration import fit_temperature
from pliant.policies.encoder.confidence import confidence, softmax
from pliant.policies.encoder.exits import choose_cut_off, stops
from pliant.texts import Text
from pliant.training import early_layers
from pliant.training.early_layers import Recipe
from pliant.training.labelled_texts import LabelledText

_PASS = 16
"""Texts that are computed together."""

Texts = Sequence[LabelledText]


class Splits(NamedTuple):
    """Labelled texts, none in two of them."""

    train: Texts
    """May be what the model has learned from."""
    calibrate: Texts
    choose: Texts


class Trained(NamedTuple):
    """What the exits do, on the texts that the cut-off was chosen on."""

    after: tuple[int, ...]
    cut_off: float
    accuracies: tuple[float, ...]
    """Of each exit if all texts left there, and of the whole model."""
    shares: tuple[float, ...]
    """Of texts that leave at each, and of those that go through all layers."""
    accuracy: float
    """With texts that leave early."""
    model_accuracy: float
    """Of the model as it was given."""


def train(
    folder: Path,
    info: EncoderInfo,
    after: Sequence[int],
    texts: Splits,
    loss: float,
    out: Path,
    report: Callable[[str, float], object],
    layers_learn: Recipe | None = None,
) -> Trained:
    """Write the text classifier in `folder` to `out`, with exits behind so many of its layers.

    Texts leave where that loses at most `loss` of the accuracy of the model as it is in `folder`, by the margin of
    `choose_cut_off`. Raises ModelError for a model that pliant does not compute itself, layers that it does not have,
    and exits of which none is good enough.
    """
    reader = _Reader(folder, info, after)
    if layers_learn is None:
        return _train(folder, reader, info, after, texts, loss, out, report)
    _, before = reader.read(texts.choose, partial(report, "reading texts with the model as it is"))
    with TemporaryDirectory() as made:
        learned = Path(made)
        progress = partial(report, "training all layers")
        early_layers.train(folder, info, after, texts.train, layers_learn, learned, progress)
        return _train(learned, _Reader(learned, info, after), info, after, texts, loss, out, report, before)


def _train(
    folder: Path,
    reader: _Reader,
    info: EncoderInfo,
    after: Sequence[int],
    texts: Splits,
    loss: float,
    out: Path,
    report: Callable[[str, float], object],
    before: np.ndarray | None = None,
) -> Trained:
    """Without the layers, of which `before` are the logits of the texts to choose on, if they have learned since."""
    truth = [np.array([info.labels.index(text.label) for text in part]) for part in texts]
    read = []
    for part, what in zip(texts, Splits._fields, strict=True):
        read.append(reader.read(part, partial(report, f"reading texts to {what}")))
    heads = []
    for index, behind in enumerate(after):
        report(f"training the exit behind layer {behind}", index / len(after))
        learned, calibrating = (states[index] for states, _ in read[:2])
        heads.append(_head(learned, calibrating, truth[0], truth[1], len(info.labels)))
    states, whole = read[2]
    said = [each @ weight.T + bias for each, (weight, bias) in zip(states, heads, strict=True)]
    sure = np.stack([confidence(softmax(logits)) for logits in said])
    right = np.stack([logits.argmax(1) == truth[2] for logits in (*said, whole)])
    model_right = right[-1] if before is None else before.argmax(1) == truth[2]
    cut_off = choose_cut_off(sure, right, model_right, loss)
    if cut_off == 1.0:
        raise ModelError(
            f"{folder}: no text can leave early within an accuracy loss of {loss:g}; allow more, give more texts, to "
            "train or to choose on, or choose later layers"
        )
    left = stops(sure, cut_off)
    _write(folder, out, ExitsInfo(after=tuple(after), cut_off=cut_off), heads)
    return Trained(
        tuple(after),
        cut_off,
        tuple(right.mean(1).tolist()),
        tuple((np.bincount(left, minlength=len(after) + 1) / len(left)).tolist()),
        float(right[left, np.arange(len(left))].mean()),
        float(model_right.mean()),
    )


class _Reader:
    """Computes what exits read, as exits would say it that nobody is sure enough for, and what the whole model says."""

    def __init__(self, folder: Path, info: EncoderInfo, after: Sequence[int]) -> None:
        threads = len(os.sched_getaffinity(0))
        encoder = info.chooses and packed_runtime.load(folder, info.max_length, threads=threads).encoder
        if not encoder:
            raise ModelError(
                f"{folder}: exits are for models that choose one of several labels and that pliant computes itself"
            )
        if list(after) != sorted({*after} & {*range(encoder.layers)}):
            raise ModelError(f"{folder}: layers with exits must rise from 0 to {encoder.layers - 1}; got {list(after)}")
        self._exits = len(after)
        as_read = np.stack([np.eye(encoder.hidden, dtype=np.float32)] * self._exits)
        nothing = np.zeros((self._exits, encoder.hidden), np.float32)
        self._leave = encoder.exits(Exits(tuple(after), as_read, nothing, inf))
        self._tokenizer = encoder_tokenizer(folder, info, info.max_length)
        self._pairs = info.pairs

    def read(self, texts: Texts, report: Callable[[float], object]) -> tuple[list[np.ndarray], np.ndarray]:
        """What each exit reads [n, hidden], and the model's logits [n, labels]."""
        found: list[list[np.ndarray]] = []
        for start in range(0, len(texts), _PASS):
            report(start / len(texts))
            found.append(self._pass([text.text for text in texts[start : start + _PASS]]))
        *read, logits = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return read, logits

    def _pass(self, texts: Sequence[Text]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch(list(texts))
        ids = np.concatenate([np.array(encoding.ids, np.int64) for encoding in encodings])
        types = np.concatenate([np.array(encoding.type_ids, np.int64) for encoding in encodings])
        lengths = [len(encoding) for encoding in encodings]
        each = np.ones((self._exits, len(lengths)))
        left = self._leave(Batch(ids, types if self._pairs and types.any() else None, lengths, each, inf * each))
        return [*left.said, np.asarray(left.answers)]


def _head(
    states: np.ndarray, calibrating: np.ndarray, truth: NDArray[np.int64], true: NDArray[np.int64], labels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and biases of calibrated logits, trained by states and their labels, calibrated by others'."""
    from pliant.training.exits import fit

    weight, bias = fit(states, truth, labels)
    temperature = np.float32(fit_temperature(calibrating @ weight.T + bias, true))
    return weight / temperature, bias / temperature


def _write(folder: Path, out: Path, info: ExitsInfo, heads: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """The model's files, and the exits."""
    for file in {file for pattern in hub.FILES for file in folder.glob(pattern)}:
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    into = out / encoder_exits.FOLDER
    into.mkdir(exist_ok=True)
    tensors = {"weights": np.stack([weight for weight, _ in heads]), "biases": np.stack([bias for _, bias in heads])}
    save_file(tensors, into / hub.WEIGHTS)
    encoder_exits.write(out, info)
