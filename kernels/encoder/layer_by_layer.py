"""Texts leave an encoder that computes a few layers at a time, between which who stays is chosen here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from pliant.kernels.encoder.exits import Batch, Exits, Left

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


class Steps(Protocol[Means]):
    """An encoder in such steps."""

    @property
    def layers(self) -> int:
        """How many there are."""

    def begin(self, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int]) -> Pass[Means]:
        """Of packed texts, as in `exits.Batch`."""

    def exit(self, weight: np.ndarray, bias: np.ndarray) -> Callable[[Means], np.ndarray]:
        """What the exit with `weight`, float32 [labels, hidden], and `bias` says of means: float32 [texts, labels]."""


class LayerByLayer(Generic[Means]):
    """An `exits.Leave`."""

    def __init__(self, encoder: Steps[Means], exits: Exits) -> None:
        self._encoder = encoder
        self._after, self._labels = exits.after, exits.biases.shape[1]
        self._says = [encoder.exit(*both) for both in zip(exits.weights, exits.biases, strict=True)]

    def __call__(self, batch: Batch) -> Left:
        started = time.perf_counter()
        temperatures, sure_from = batch.temperatures, batch.sure_from
        said = np.zeros((*temperatures.shape, self._labels), np.float32)
        seconds = [0.0] * len(self._after)
        layers = np.full(len(batch.lengths), self._encoder.layers)
        texts = np.arange(len(batch.lengths))
        going = self._encoder.begin(batch.ids, batch.types, batch.lengths)
        for place, (after, says) in enumerate(zip(self._after, self._says, strict=True)):
            reading = temperatures[place, texts] > 0
            if not reading.any():
                continue
            going.advance(after)
            readers = texts[reading]
            said[place, readers] = says(going.means())[reading]
            leaving = np.zeros(len(texts), bool)
            sure = _confidence(said[place, readers] / temperatures[place, readers, None])
            leaving[reading] = sure >= sure_from[place, readers]
            seconds[place] = time.perf_counter() - started
            layers[texts[leaving]] = after
            texts = texts[~leaving]
            if not len(texts):
                return Left(said, seconds, layers.tolist(), ())
            if leaving.any():
                going.keep(~leaving)
        going.advance(self._encoder.layers)
        return Left(said, seconds, layers.tolist(), going.answers())


def _confidence(logits: np.ndarray) -> np.ndarray:
    """The probability of the likeliest label, [texts]."""
    found: np.ndarray = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    return found
