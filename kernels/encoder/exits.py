"""Early exit: texts whose answer is sure behind some of the layers leave there, and the others go on together.

An exit reads the mean of a text's states. One that leaves makes the pass shorter for those that stay: their states move
together, and the layers that follow compute them alone (DeeBERT; Tabi §7.5). Each text has its own exits and cut-offs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import inf, nextafter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pliant.errors import ModelError
from pliant.kernels.encoder.cpu_encoder import CpuEncoder
from pliant.kernels.encoder.texts import Output, Stop
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
    """A text leaves at the first exit whose confidence is above that, unless it says where it may."""

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Where a text may leave that does not say so."""
        return tuple(Stop(after, 1.0, nextafter(self.cut_off, inf)) for after in self.after)


def load(folder: Path) -> Exits:
    """Those of the encoder in `folder`. Raises ModelError if it has none that can be read."""
    info = encoder_exits.read(folder)
    saved = SavedTensors(folder / encoder_exits.FOLDER)
    if missing := {"weights", "biases"} - saved.names:
        raise ModelError(f"{folder / encoder_exits.FOLDER}: has no {', '.join(sorted(missing))}; {encoder_exits.TRAIN}")
    return Exits(info.after, saved.array("weights"), saved.array("biases"), info.cut_off)


def run_early(
    encoder: CpuEncoder,
    exits: Exits,
    ids: np.ndarray,
    types: np.ndarray | None,
    lengths: Sequence[int],
    stops: Sequence[Sequence[Stop]],
) -> list[Output]:
    """What there is to say of each text, which may leave at its `stops`; for other arguments see `CpuEncoder`.

    Raises ValueError for a stop where there is no exit.
    """
    started = time.perf_counter()
    plans = [{stop.after: stop for stop in each} for each in stops]
    if unknown := {after for plan in plans for after in plan} - {*exits.after}:
        raise ValueError(f"there are no exits behind {sorted(unknown)} layers; there are behind {list(exits.after)}")
    said: list[list[np.ndarray]] = [[] for _ in lengths]
    known_s: list[list[float]] = [[] for _ in lengths]
    layers = [encoder.layers] * len(lengths)
    places, sizes = np.arange(len(lengths)), np.asarray(lengths)
    states, done = None, 0
    for after, weight, bias in zip(exits.after, exits.weights, exits.biases, strict=True):
        readers = np.flatnonzero([after in plans[place] for place in places.tolist()])
        if not len(readers):
            continue
        states = encoder.states(ids, types, sizes.tolist(), range(done, after), states)
        done = after
        logits = means(states, sizes)[readers] @ weight.T + bias
        texts = places[readers].tolist()
        at = [plans[text][after] for text in texts]
        leaving = np.zeros(len(places), bool)
        sure = _confidence(logits / np.array([[stop.temperature] for stop in at]))
        leaving[readers] = sure >= [stop.sure_from for stop in at]
        seconds = time.perf_counter() - started
        for text, row in zip(texts, logits, strict=True):
            said[text].append(row)
            known_s[text].append(seconds)
        for text in places[leaving].tolist():
            layers[text] = after
        places, staying = places[~leaving], np.repeat(~leaving, sizes)
        sizes = sizes[~leaving]
        if not len(places):
            break
        if leaving.any():
            ids, states = ids[staying], states[staying]
            types = None if types is None else types[staying]
    if len(places):
        states = encoder.states(ids, types, sizes.tolist(), range(done, encoder.layers), states)
        for text, row in zip(places.tolist(), encoder.answers(states, sizes.tolist()), strict=True):
            said[text].append(row)
    return [
        Output(rows[-1], None, depth, rows[:-1], seconds[: len(rows) - 1])
        for rows, depth, seconds in zip(said, layers, known_s, strict=True)
    ]


def means(states: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """What exits read: float32 [texts, hidden] of states [tokens, hidden]."""
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    found: np.ndarray = np.add.reduceat(states, firsts) / lengths[:, None].astype(np.float32)
    return found


def _confidence(logits: np.ndarray) -> np.ndarray:
    """The probability of the likeliest label, [texts]."""
    found: np.ndarray = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    return found
