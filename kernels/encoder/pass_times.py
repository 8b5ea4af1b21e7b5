"""Measures T(texts, length) of a runtime for batches: what a pass over so many texts of so many tokens takes."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pliant.formats.pass_times import PassTimes
from pliant.kernels.encoder.texts import Output, Text

_SHORTEST = 8
_MOST_TEXTS = 32
_MOST_TOKENS = 1024
"""Of a pass, but that one text of the longest length is always measured: weights have long been used well then."""
_ROUNDS = (3, 15)
"""The fewest and the most times that each pass is measured; in between, the budget decides."""


class Batching(Protocol):
    max_length: int

    def run_all(self, texts: Sequence[Text]) -> Sequence[Output]: ...


def measure(
    runtime: Batching, *, budget_s: float = 10.0, report: Callable[[float], object] = lambda _done: None
) -> PassTimes:
    """The table of `runtime`, within about `budget_s` seconds.

    Times are the least of interleaved passes: what else the machine does meanwhile is no part of them.

    `report` is called with the share that is done.
    """
    lengths = (*(n for n in _doubled(_SHORTEST) if n < runtime.max_length), runtime.max_length)
    counts = tuple(n for n in _doubled(1) if n <= _MOST_TEXTS)
    cells = [(n, length) for n in counts for length in lengths if n == 1 or n * length <= _MOST_TOKENS]
    passes = [[Text(np.ones(length, np.int64))] * n for n, length in cells]
    rounds: list[list[float]] = []
    begun = time.perf_counter()
    fewest, most = _ROUNDS
    while len(rounds) < most:
        rounds.append([])
        for texts in passes:
            start = time.perf_counter()
            runtime.run_all(texts)
            rounds[-1].append(time.perf_counter() - start)
        spent = (time.perf_counter() - begun) / budget_s
        if len(rounds) >= fewest and spent >= 1:
            break
        report(min(1.0, max(spent, len(rounds) / most)))
    found = dict(zip(cells, np.min(rounds, axis=0).tolist(), strict=True))
    seconds = tuple(tuple(found.get((n, length), 0.0) for length in lengths) for n in counts)
    return PassTimes(counts=counts, lengths=lengths, seconds=seconds)


def _doubled(first: int) -> list[int]:
    return [first << power for power in range(16)]
