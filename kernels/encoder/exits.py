"""Early exit: texts whose answer is sure behind some of the layers leave there, and the others go on together.

An exit reads the mean of a text's states. One that leaves makes the pass shorter for those that stay: their states move
together, and the layers that follow compute them alone (DeeBERT; Tabi §7.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pliant.errors import ModelError
from pliant.kernels.encoder.cpu_encoder import CpuEncoder
from pliant.kernels.saved_tensors import SavedTensors
from pliant.models import encoder_exits


class Exits(NamedTuple):
    """Of one encoder."""

    after: tuple[int, ...]
    """Behind how many layers each is, in rising order."""
    weights: np.ndarray
    """float32 [exits, labels, hidden], of calibrated logits."""
    biases: np.ndarray
    """float32 [exits, labels]"""
    cut_off: float
    """A text leaves at the first exit whose confidence is above that."""


def load(folder: Path) -> Exits:
    """Those of the encoder in `folder`. Raises ModelError if it has none that can be read."""
    info = encoder_exits.read(folder)
    saved = SavedTensors(folder / encoder_exits.FOLDER)
    if missing := {"weights", "biases"} - saved.names:
        raise ModelError(f"{folder / encoder_exits.FOLDER}: has no {', '.join(sorted(missing))}; {encoder_exits.TRAIN}")
    return Exits(info.after, saved.array("weights"), saved.array("biases"), info.cut_off)


def run_early(
    encoder: CpuEncoder, exits: Exits, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits, float32 [texts, labels], and the layers that were computed, [texts]; for arguments see `CpuEncoder`."""
    answers = np.empty((len(lengths), exits.biases.shape[1]), np.float32)
    layers = np.full(len(lengths), encoder.layers)
    places, sizes = np.arange(len(lengths)), np.asarray(lengths)
    states, done = None, 0
    for after, weight, bias in zip(exits.after, exits.weights, exits.biases, strict=True):
        states = encoder.states(ids, types, sizes.tolist(), range(done, after), states)
        done = after
        logits = means(states, sizes) @ weight.T + bias
        leaving = _confidence(logits) > exits.cut_off
        answers[places[leaving]], layers[places[leaving]] = logits[leaving], after
        if leaving.all():
            return answers, layers
        if leaving.any():
            staying = np.repeat(~leaving, sizes)
            ids, states = ids[staying], states[staying]
            types = None if types is None else types[staying]
            places, sizes = places[~leaving], sizes[~leaving]
    states = encoder.states(ids, types, sizes.tolist(), range(done, encoder.layers), states)
    answers[places] = encoder.answers(states, sizes.tolist())
    return answers, layers


def means(states: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """What exits read: float32 [texts, hidden] of states [tokens, hidden]."""
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    found: np.ndarray = np.add.reduceat(states, firsts) / lengths[:, None].astype(np.float32)
    return found


def _confidence(logits: np.ndarray) -> np.ndarray:
    """The probability of the likeliest label, [texts]."""
    found: np.ndarray = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    return found
