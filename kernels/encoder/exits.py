"""Early exit: texts whose answer is sure behind some of the layers leave there, and the others go on together.

An exit reads the mean of a text's states. One that leaves makes the pass shorter for those that stay: their states move
together, and the layers that follow compute them alone (DeeBERT; Tabi §7.5). Each text has its own exits and cut-offs.
Where states lie, and what computes them, is the encoder's: here are only the exits' logits, and who leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf, nextafter
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pliant.errors import ModelError
from pliant.kernels.encoder.texts import Output, Stop
from pliant.kernels.saved_tensors import SavedTensors
from pliant.models import encoder_exits

Means = TypeVar("Means")
Means_co = TypeVar("Means_co", covariant=True)


class Pass(Protocol[Means_co]):
    """Texts that go through an encoder's layers together, as far as they are wanted to."""

    def advance(self, end: int) -> None:
        """Through the layers that come next, up to, but without, `end`. The first time ids are embedded, too."""

    def means(self) -> Means_co:
        """What exits read, where it was computed: float32 [texts, hidden]. Not behind the last layer."""

    def keep(self, staying: np.ndarray) -> None:
        """Go on with these alone, bool [texts]; never with none."""

    def answers(self) -> np.ndarray:
        """float32 [texts, outputs], or [tokens, outputs] if each token has its answer, behind the last layer."""


class LayeredEncoder(Protocol[Means]):
    """One whose layers are computed as far as a pass needs them."""

    @property
    def layers(self) -> int:
        """How many there are."""

    def begin(self, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int]) -> Pass[Means]:
        """Of packed texts: `ids`, int64 [tokens], and `types`, int64 [tokens], which tell the two texts of a pair apart
        (None: all 0)."""

    def exit(self, weight: np.ndarray, bias: np.ndarray) -> Callable[[Means], np.ndarray]:
        """What the exit with `weight`, float32 [labels, hidden], and `bias` says of means: float32 [texts, labels]."""


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


class EarlyExit(Generic[Means]):
    """An encoder that texts leave at its `exits`."""

    def __init__(self, encoder: LayeredEncoder[Means], exits: Exits) -> None:
        self._encoder = encoder
        self._after = exits.after
        self._says = [encoder.exit(*both) for both in zip(exits.weights, exits.biases, strict=True)]

    def run(
        self, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], stops: Sequence[Sequence[Stop]]
    ) -> list[Output]:
        """What there is to say of each text, which may leave at its `stops`; for the rest see `LayeredEncoder.begin`.

        Raises ValueError for a stop where there is no exit.
        """
        started = time.perf_counter()
        plans = [{stop.after: stop for stop in each} for each in stops]
        if unknown := {after for plan in plans for after in plan} - {*self._after}:
            raise ValueError(
                f"there are no exits behind {sorted(unknown)} layers; there are behind {list(self._after)}"
            )
        said: list[list[np.ndarray]] = [[] for _ in lengths]
        known_s: list[list[float]] = [[] for _ in lengths]
        layers = [self._encoder.layers] * len(lengths)
        places = np.arange(len(lengths))
        going = self._encoder.begin(ids, types, lengths)
        for after, says in zip(self._after, self._says, strict=True):
            readers = np.flatnonzero([after in plans[place] for place in places.tolist()])
            if not len(readers):
                continue
            going.advance(after)
            logits = says(going.means())[readers]
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
            places = places[~leaving]
            if not len(places):
                break
            if leaving.any():
                going.keep(~leaving)
        if len(places):
            going.advance(self._encoder.layers)
            for text, row in zip(places.tolist(), going.answers(), strict=True):
                said[text].append(row)
        return [
            Output(rows[-1], None, depth, rows[:-1], seconds[: len(rows) - 1])
            for rows, depth, seconds in zip(said, layers, known_s, strict=True)
        ]


def _confidence(logits: np.ndarray) -> np.ndarray:
    """The probability of the likeliest label, [texts]."""
    found: np.ndarray = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    return found
