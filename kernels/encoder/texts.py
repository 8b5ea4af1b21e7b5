"""What runtimes take and give: texts as token ids, and an answer for each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pliant.message import message


@message
class Stop(NamedTuple):
    """An exit at which a text may leave its encoder."""

    after: int
    """Behind how many layers it is."""
    temperature: float
    """That its logits are calibrated with."""
    sure_from: float
    """The calibrated confidence from which on the text leaves there: always with 0, never with infinity."""


class Text(NamedTuple):
    """One text, or two that are read together."""

    ids: np.ndarray | Sequence[int]
    """Of its tokens, special ones included."""
    types: np.ndarray | Sequence[int] | None = None
    """1 for tokens of the second of two texts, else 0; None: all 0, as for models that do not tell them apart."""
    stops: Sequence[Stop] = ()
    """Where it may leave, in rising order, if not where the runtime has all texts leave."""


class Output(NamedTuple):
    """What an encoder says of one text."""

    logits: np.ndarray
    """float32 [labels], [tokens, labels] of a model that labels tokens, or an embedding [dimensions]."""
    importance: np.ndarray | None
    """float32 [tokens]: the attention that each token received (see `importance.received`), if the runtime gives it."""
    layers: int | None = None
    """How many were computed, by a runtime that texts leave early."""
    earlier: Sequence[np.ndarray] = ()
    """The logits of the exits that read it before."""
    earlier_s: Sequence[float] = ()
    """Seconds from the start of the pass until each of these was known."""


class Accepted(NamedTuple):
    """Which texts a model can read."""

    max_length: int
    vocabulary: int
    token_types: int

    def check(self, text: Text) -> None:
        """Raise ValueError unless `text` has 1 to `max_length` ids that are in the vocabulary, and types that fit."""
        length = len(text.ids)
        if not 0 < length <= self.max_length:
            raise ValueError(f"got {length} token ids; this runtime takes 1 to {self.max_length}")
        low, high = _range(text.ids)
        if low < 0 or high >= self.vocabulary:
            raise ValueError(f"token ids must lie in 0 to {self.vocabulary - 1}; got {low} to {high}")
        if text.types is None:
            return
        most = max(self.token_types, 1)
        low, high = _range(text.types) if len(text.types) == length else (-1, -1)
        if low < 0 or high >= most:
            raise ValueError(f"there must be a token type from 0 to {most - 1} for each token")


def _range(numbers: np.ndarray | Sequence[int]) -> tuple[int, int]:
    found = np.asarray(numbers)
    return found.min(), found.max()
