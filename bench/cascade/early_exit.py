"""Early exit: the whole encoder with a classifier after each layer, which stops where one is sure (DeeBERT; Tabi §7.5).

As DeeBERT does, the encoder is fine-tuned first and then left as it is while the classifiers learn. How long so many
layers take is read off the fine-tuned models of 1, 2, 3 and 6 layers, and an exit itself is taken to cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from pliant.bench.cascade.fine_tuning import pad
from pliant.bench.cascade.tasks import Texts
from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.encoder.confidence import confidence, softmax
from pliant.texts import Text
from pliant.torchvision_ops import declare
from pliant.zoo.repeatable import one_thread

declare()
from transformers import BertForSequenceClassification  # noqa: E402

_FILE = "exits.safetensors"
_EPOCHS, _BATCH, _LEARNING_RATE = 10, 64, 1e-3
_THRESHOLDS = np.concatenate([np.arange(0.3, 0.95, 0.05), np.arange(0.95, 1.0, 0.01), [0.999]])


@dataclass(frozen=True)
class EarlyExit:
    """What it does on the test split, where confidence beyond `threshold` is sure enough."""

    threshold: float
    accuracy: float
    saved: float
    """Of the whole encoder's mean latency."""


def learn(model: Path, texts: Texts, labels: Sequence[str], folder: Path) -> None:
    """Train a classifier for each layer of `model` but the last on `texts`, and save them to `folder`."""
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(0)
        states, _ = _states(model, [text.text for text in texts])
        truth = torch.tensor([labels.index(text.label) for text in texts])
        exits = [_fit(states[:, layer], truth, len(labels)) for layer in range(states.shape[1])]
    save_file({f"{layer}.{name}": of for layer, one in enumerate(exits) for name, of in one.items()}, folder / _FILE)


def logits(model: Path, exits: Path, texts: Sequence[Text]) -> Floats:
    """After each layer, [layers, n, labels]."""
    weights = load_file(exits / _FILE)
    with one_thread():
        states, last = _states(model, texts)
    found = []
    for layer in range(states.shape[1]):
        one = {name: weights[f"{layer}.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
        exit_ = _exit(states.shape[2], last.shape[1])
        exit_.load_state_dict(one)
        found.append(exit_(states[:, layer]).detach())
    return torch.stack([*found, last]).numpy().astype(np.float64)


def best(choose: Exits, test: Exits, loss: float) -> EarlyExit:
    """The fastest threshold that meets the target on the choose split."""
    meets = []
    for threshold in _THRESHOLDS.tolist():
        lost = float((choose.right(choose.all_layers) - choose.right(choose.stops(threshold))).mean())
        if lost <= loss:
            meets.append((choose.mean_s(choose.stops(threshold)), threshold))
    threshold = min(meets)[1] if meets else 1.0
    stops = test.stops(threshold)
    saved = 1 - test.mean_s(stops) / test.mean_s(test.all_layers)
    return EarlyExit(threshold, float(test.right(stops).mean()), saved)


@dataclass(frozen=True, eq=False)
class Exits:
    """What comes after each layer on the texts of a split. Layers count from 0."""

    logits: Floats
    """[layers, n, labels]"""
    truth: NDArray[np.integer]
    """[n]"""
    seconds: Floats
    """What each text takes up to each layer, [layers, n]."""

    @property
    def all_layers(self) -> Integers:
        """The stops of texts that never leave early, [n]."""
        return np.full(len(self.truth), len(self.logits) - 1)

    def stops(self, threshold: float) -> Integers:
        """The first layer that is sure enough of each text, [n]."""
        sure = confidence(softmax(self.logits)) > threshold
        sure[-1] = True
        first: Integers = sure.argmax(axis=0)
        return first

    def right(self, stops: Integers) -> Floats:
        """1 for each text that is answered with the true label after this layer, else 0."""
        hits: Floats = (self.logits.argmax(axis=2)[stops, np.arange(len(stops))] == self.truth).astype(np.float64)
        return hits

    def mean_s(self, stops: Integers) -> float:
        return float(self.seconds[stops, np.arange(len(stops))].mean())


def by_layers(of: Mapping[int, Floats]) -> Floats:
    """Seconds of 1, 2, … layers [layers, n], on straight lines between those that are known, [n] each."""
    known = np.stack([of[number] for number in sorted(of)])
    layers = np.arange(1, max(of) + 1)
    return np.stack([np.interp(layers, sorted(of), column) for column in known.T], axis=1)


def _exit(width: int, labels: int) -> nn.Sequential:
    """A pooler and a classifier, as at the end of the whole model."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, labels))


def _fit(states: Tensor, truth: Tensor, labels: int) -> dict[str, Tensor]:
    exit_ = _exit(states.shape[1], labels)
    optimizer = torch.optim.AdamW(exit_.parameters(), lr=_LEARNING_RATE)
    for _ in range(_EPOCHS):
        for rows in torch.split(torch.randperm(len(truth)), _BATCH):
            functional.cross_entropy(exit_(states[rows]), truth[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return exit_.state_dict()


@torch.no_grad()
def _states(model: Path, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
    """The first token's state after each layer but the last, [n, layers - 1, hidden], and the logits [n, labels]."""
    whole = BertForSequenceClassification.from_pretrained(model)
    whole.eval()  # type: ignore[no-untyped-call]
    encodings = Tokenizer.from_file(str(model / "tokenizer.json")).encode_batch(list(texts))
    order = sorted(range(len(texts)), key=lambda place: len(encodings[place]))
    states = torch.zeros(len(texts), whole.config.num_hidden_layers - 1, whole.config.hidden_size)
    logits = torch.zeros(len(texts), whole.classifier.out_features)
    for rows in (order[start : start + _BATCH] for start in range(0, len(order), _BATCH)):
        output = whole(**pad([encodings[place] for place in rows]), output_hidden_states=True)
        states[rows] = torch.stack([state[:, 0] for state in output.hidden_states[1:-1]], dim=1)
        logits[rows] = output.logits
    return states, logits
