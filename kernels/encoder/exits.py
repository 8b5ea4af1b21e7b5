"""Early exit: texts whose answer is sure behind some of the layers leave there, and the others go on together.

An exit reads the mean of a text's states. One that leaves makes the pass shorter for those that stay: their states move
together, and the layers that follow compute them alone (DeeBERT; Tabi §7.5). Each text has its own exits and cut-offs.
Which text reads which exit is said here; who computes the layers also decides who leaves: an encoder on a CPU in one
call (`cpu_encoder`), others layer by layer (`layer_by_layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nextafter
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from pliant.errors import ModelError
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


class Batch(NamedTuple):
    """Packed texts, and where each may leave: at the first exit that is as sure as it wants."""

    ids: np.ndarray
    """int64 [tokens]"""
    types: np.ndarray | None
    """int64 [tokens], which tell the two texts of a pair apart; None: all 0."""
    lengths: Sequence[int]
    temperatures: np.ndarray
    """float64 [exits, texts]: by which the exit's logits are divided; where it is 0 the text does not read the exit."""
    sure_from: np.ndarray
    """float64 [exits, texts]"""


class Left(NamedTuple):
    """What became of the texts of a pass."""

    said: np.ndarray
    """float32 [exits, texts, labels]: calibrated logits of each text at the exits that it read; elsewhere anything."""
    seconds: Sequence[float]
    """[exits]: from the start of the pass until these were known."""
    layers: Sequence[int]
    """[texts]: behind how many each left, or all."""
    answers: Sequence[np.ndarray] | np.ndarray
    """Of the texts that did not leave, in their order: float32 [outputs], or [tokens, outputs] if each token has its
    answer."""


Leave = Callable[[Batch], Left]
"""A pass through an encoder that texts leave."""


class LayeredEncoder(Protocol):
    """One whose layers are computed as far as a pass needs them."""

    @property
    def layers(self) -> int:
        """How many there are."""

    @property
    def hidden(self) -> int:
        """Numbers of a token's state."""

    def exits(self, exits: Exits) -> Leave:
        """Passes that texts leave at these, none of which is behind the last layer."""


class EarlyExit:
    """An encoder that texts leave at its `exits`."""

    def __init__(self, encoder: LayeredEncoder, exits: Exits) -> None:
        self._leave = encoder.exits(exits)
        self._layers = encoder.layers
        self._places = {after: place for place, after in enumerate(exits.after)}

    def run(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], stops: Sequence[Sequence[Stop]]
    ) -> list[Output]:
        """What there is to say of each text, which may leave at its `stops`; for the rest see `Batch`.

        Raises ValueError for a stop where there is no exit.
        """
        places = self._places
        if unknown := {stop.after for each in stops for stop in each} - places.keys():
            raise ValueError(f"there are no exits behind {sorted(unknown)} layers; there are behind {list(places)}")
        temperatures, sure_from = np.zeros((2, len(places), len(lengths)))
        for text, each in enumerate(stops):
            for stop in each:
                place = places[stop.after], text
                temperatures[place], sure_from[place] = stop.temperature, stop.sure_from
        left = self._leave(Batch(ids, types, lengths, temperatures, sure_from))
        whole = iter(left.answers)
        outputs = []
        for text, (depth, each) in enumerate(zip(left.layers, stops, strict=True)):
            read = [places[stop.after] for stop in each if stop.after <= depth]
            rows = [left.said[place, text] for place in read]
            if depth == self._layers:
                rows.append(next(whole))
            seconds = [left.seconds[place] for place in read[: len(rows) - 1]]
            outputs.append(Output(rows[-1], None, depth, rows[:-1], seconds))
        return outputs
