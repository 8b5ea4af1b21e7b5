"""Seconds that one request takes, by runtime and length: the models of Arlo's evaluation (§2, Figure 2), and one on a
GPU that was measured."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np

from pliant.policies.encoder.batching import PaddedTimes
from pliant.simulation.arrivals import Integers

STEP = 64
LONGEST = 512
_SIZES = (1, 2, 4, 8, 16, 32)
"""Texts of a batch, as static runtimes have them."""
_MOST_INFLATED, _LEAST_INFLATED = 3.56, 1.22
"""The dynamic runtime's time over that of the static one, as far as they go (§2.2)."""


@dataclass(frozen=True)
class Profile(ABC):
    """A model with static runtimes for any number of tokens, and a dynamic runtime, which runs any length."""

    name: str
    slo_s: float

    @abstractmethod
    def static_s(self, tokens: int) -> float:
        """Seconds that a text takes on a static runtime of so many tokens, however long it is."""

    @abstractmethod
    def batch_s(self, texts: int, tokens: int) -> float:
        """The same for so many texts together."""

    @abstractmethod
    def dynamic_s(self, length: int, texts: int = 1) -> float:
        """Seconds that a batch takes on the dynamic runtime, padded to `length` tokens."""

    def mean_static_s(self, lengths: Integers) -> float:
        """`static_s` on average over requests of these lengths, each on the shortest runtime that it fits into."""
        return float(np.asarray(self.static_table(LONGEST))[lengths].mean())

    def static_table(self, longest: int) -> list[float]:
        """Seconds by length from 0 to `longest`, each on the shortest runtime that it fits into."""
        return [self.static_s(max(1, length)) for length in range(longest + 1)]

    def padded_table(self, max_length: int) -> list[float]:
        """Seconds by length from 0 to `max_length`, all on a runtime of `max_length` tokens."""
        return [self.static_s(max_length)] * (max_length + 1)

    def dynamic_table(self, max_length: int) -> list[float]:
        """`dynamic_s` for each length from 0 to `max_length`."""
        return [self.dynamic_s(length) for length in range(max_length + 1)]

    def padded_times(self, lengths: tuple[int, ...], most: int) -> PaddedTimes:
        """Of static runtimes for these lengths and for batches of up to `most` texts."""
        sizes = tuple(size for size in _SIZES if size <= most)
        table = tuple(tuple(self.batch_s(size, length) for length in lengths) for size in sizes)
        return PaddedTimes(sizes, lengths, table)


@dataclass(frozen=True)
class Paper(Profile):
    """A model whose static runtimes get slower in steps of 64 tokens.

    A static runtime takes a time that grows linearly with its max_length. A batch takes as long as one text of as many
    tokens, since linear layers do not care whose they are; attention, which costs the one text more, is neglected.

    A dynamic runtime takes longer by a factor that falls with the length, from 3.56 to 1.22. The paper shows it in
    Figure 2, which its text does not have, but says what became of it: how fast the factor falls is set so that Arlo's
    mean latency is as far below DT's as in Figure 6, where little is queued.
    """

    shortest_s: float
    """Of a static runtime for 64 tokens."""
    longest_s: float
    """Of a static runtime for 512 tokens."""
    fall: float
    """Tokens over which what the factor exceeds 1.22 by falls to a share of 1 / e."""

    def static_s(self, tokens: int) -> float:
        steps = -(-tokens // STEP) - 1
        return self.shortest_s + (self.longest_s - self.shortest_s) * steps / (LONGEST // STEP - 1)

    def batch_s(self, texts: int, tokens: int) -> float:
        return self.static_s(texts * tokens)

    def inflation(self, length: int) -> float:
        """What the dynamic runtime takes for a text of `length` tokens, over what a static one of this length does."""
        return _LEAST_INFLATED + (_MOST_INFLATED - _LEAST_INFLATED) * math.exp(-max(0, length - 1) / self.fall)

    def dynamic_s(self, length: int, texts: int = 1) -> float:
        return self.static_s(max(1, length * texts)) * self.inflation(length)


@dataclass(frozen=True)
class Measured(Profile):
    """A model on a GPU, by the stage `encoders` of `python -m bench gpu`. All mappings are of tokens to seconds.

    What lies between lengths that were measured is linear; no text takes more than a longer one did, which keeps noise
    out. What several texts take more than one is what they take more where texts are packed, on either kind of runtime.
    """

    static: Mapping[int, float]
    """One text on a static runtime."""
    dynamic: Mapping[int, float]
    """One text on the dynamic runtime."""
    packed: Mapping[int, float]
    """Short texts of so many tokens together."""

    @classmethod
    def of(cls, name: str, table: Mapping[str, Any]) -> Self:
        """From the table of one model."""
        shortest = min(map(int, table["packed_s"]))
        together = {shortest * int(texts): seconds for texts, seconds in table["packed_s_by_texts"].items()}
        static, dynamic = (
            {int(length): seconds for length, seconds in table[kind].items()} for kind in ("static_s", "dynamic_s")
        )
        return cls(name, BASE.slo_s, static, dynamic, together)

    @classmethod
    def read(cls, file: Path) -> Self:
        """What `write` has written."""
        found = json.loads(file.read_text())
        tables = {
            each: {int(tokens): seconds for tokens, seconds in found[each].items()}
            for each in ("static", "dynamic", "packed")
        }
        return cls(**found | tables)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def static_s(self, tokens: int) -> float:
        return _between(self.static, -(-tokens // STEP) * STEP)

    def batch_s(self, texts: int, tokens: int) -> float:
        return self.static_s(tokens) + self._more_s(texts, tokens)

    def dynamic_s(self, length: int, texts: int = 1) -> float:
        return _between(self.dynamic, length) + self._more_s(texts, length)

    def _more_s(self, texts: int, tokens: int) -> float:
        """What so many texts of as many tokens take beyond one of them."""
        return _between(self.packed, texts * tokens) - _between(self.packed, tokens)


def _between(seconds: Mapping[int, float], tokens: int) -> float:
    """Of so many tokens; of more than were measured, as much more as between the last two."""
    known = sorted(seconds)
    rising = [*accumulate((seconds[each] for each in reversed(known)), min)][::-1]
    if tokens <= known[-1] or len(known) < 2:
        return float(np.interp(tokens, known, rising))
    return rising[-1] + (rising[-1] - rising[-2]) * (tokens - known[-1]) / (known[-1] - known[-2])


BASE = Paper("Bert-Base", slo_s=0.15, shortest_s=1.13e-3, longest_s=4.86e-3, fall=30)
LARGE = Paper("Bert-Large", slo_s=0.45, shortest_s=1.8e-3, longest_s=9.45e-3, fall=38)
"""The paper gives the ratio, 5.25. The scale is ours: that at which its loads (250 requests/s a GPU, Table 4) can be
served."""
