"""What runtimes take and give: texts as token ids, and an answer for each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    """One text, or two that are read together."""

    ids: np.ndarray | Sequence[int]
    """Of its tokens, special ones included."""
    types: np.ndarray | Sequence[int] | None = None
    """1 for tokens of the second of two texts, else 0; None: all 0, as for models that do not tell them apart."""


class Output(NamedTuple):
    """What an encoder says of one text."""

    logits: np.ndarray
    """float32 [labels], [tokens, labels] of a model that labels tokens, or an embedding [dimensions]."""
    importance: np.ndarray | None
    """float32 [tokens]: the attention that each token received (see `importance.received`), if the runtime gives it."""
    layers: int | None = None
    """How many were computed, by a runtime that texts leave early."""


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
