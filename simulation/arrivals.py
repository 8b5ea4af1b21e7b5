"""When requests arrive and how long their texts are, a second at a time, so that 150 million never sit in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BURST_SHARE = 0.2
"""Of the time that a bursty stream spends in bursts."""
BURST_RATIO = 4.0
"""Its rate in a burst, over its rate outside one."""
BURST_S = 0.2
"""Mean length of a burst, in seconds."""

SPELL_S = 0.1
"""Mean length of a spell of texts that are alike, in seconds."""

LONGEST = 512
"""Tokens of the longest tweet, once stretched (`tweet_lengths`)."""
_MEDIAN, _P98, _MOST = 21, 72, 125
"""Tokens of the paper's tweets (§2.1, §5)."""
_NORMAL_P98 = 2.0537
_GRID = np.linspace(-8, 8, 4001)
_NORMAL = _GRID, np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in _GRID])
"""The normal distribution."""


class Arrivals(NamedTuple):
    """The requests of one second, in order of arrival."""

    seconds: Floats
    """When each arrives, from the start of the stream."""
    tokens: Integers
    """How long each is."""


@dataclass(frozen=True)
class Stream:
    """Arlo's workloads (§5): a rate for each second, and within it a Poisson process, or a Markov-modulated one.

    The same seed gives the same stream each time it is iterated over; an item is a second, also where none arrive.
    """

    rates: Floats
    """Requests per second, for each second."""
    lengths: Integers
    """Lengths in tokens to draw from, in rising order."""
    tilts: Floats
    """For each second: lengths are drawn at the quantile u**tilt, so that above 1 they are shorter than `lengths`."""
    bursty: bool
    """Markov-modulated: bursts and calms of exponential duration, whose mean rate is that of `rates`."""
    seed: int
    alike: float = 0.0
    """The correlation of lengths, before they are drawn, within a spell of random duration: short texts come in bursts,
    and so do long ones (Figures 1b and 4), while over minutes they are distributed as without. 0: independent."""

    def __len__(self) -> int:
        return len(self.rates)

    def __iter__(self) -> Iterator[Arrivals]:
        rng = np.random.default_rng(self.seed)
        modulation = _Modulation(rng) if self.bursty else None
        spells = _Spells(np.random.default_rng([self.seed, 1]), self.alike) if self.alike else None
        for second, (rate, tilt) in enumerate(zip(self.rates, self.tilts, strict=True)):
            if modulation:
                seconds = np.concatenate(
                    [_poisson(rng, rate * factor, start, end) for factor, start, end in modulation.next_second()]
                )
            else:
                seconds = _poisson(rng, rate, 0.0, 1.0)
            uniform = spells.quantiles(seconds) if spells else rng.random(len(seconds))
            quantiles = uniform**tilt
            yield Arrivals(second + seconds, self.lengths[(quantiles * len(self.lengths)).astype(np.int64)])


@dataclass(frozen=True)
class Recorded:
    """Requests that were recorded, or made up for a test: arrivals in seconds from 0, in order, and tokens."""

    seconds: Floats
    tokens: Integers

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.tokens):
            raise ValueError(f"got {len(self.seconds)} arrivals and {len(self.tokens)} lengths")
        if len(self.seconds) and (self.seconds[0] < 0 or np.any(np.diff(self.seconds) < 0)):
            raise ValueError("arrivals must be in order, from 0 on")

    def __len__(self) -> int:
        return int(self.seconds[-1]) + 1 if len(self.seconds) else 0

    def __iter__(self) -> Iterator[Arrivals]:
        edges = np.searchsorted(self.seconds, np.arange(len(self) + 1))
        for begin, end in pairwise(edges.tolist()):
            yield Arrivals(self.seconds[begin:end], self.tokens[begin:end])


def tweet_lengths() -> Integers:
    """Tokens of the paper's tweets stretched to 512: log-normal through their median and P98, in rising order."""
    normal = np.sort(np.random.default_rng(0).standard_normal(100_000))
    tokens = _MEDIAN * np.exp(normal * np.log(_P98 / _MEDIAN) / _NORMAL_P98)
    tokens = np.clip(tokens, 1, _MOST)
    lengths: Integers = np.ceil(tokens * LONGEST / _MOST).astype(np.int64)
    return lengths


class _Modulation:
    """The two-state Markov chain of a bursty stream."""

    def __init__(self, rng: np.random.Generator) -> None:
        calm = 1 / (1 - BURST_SHARE + BURST_SHARE * BURST_RATIO)
        self._factors = (calm, calm * BURST_RATIO)
        self._means_s = (BURST_S * (1 - BURST_SHARE) / BURST_SHARE, BURST_S)
        self._rng = rng
        self._burst = int(rng.random() < BURST_SHARE)
        self._left_s = rng.exponential(self._means_s[self._burst])

    def next_second(self) -> Iterator[tuple[float, float, float]]:
        """The states of one second: factor on the mean rate, start and end within the second."""
        start = 0.0
        while start + self._left_s < 1.0:
            yield self._factors[self._burst], start, start + self._left_s
            start += self._left_s
            self._burst = 1 - self._burst
            self._left_s = self._rng.exponential(self._means_s[self._burst])
        yield self._factors[self._burst], start, 1.0
        self._left_s -= 1.0 - start


class _Spells:
    """Quantiles of lengths that are alike within a spell: a Gaussian copula, so that each is uniform by itself."""

    def __init__(self, rng: np.random.Generator, alike: float) -> None:
        self._rng = rng
        self._own, self._shared = math.sqrt(1 - alike), math.sqrt(alike)
        self._mood = rng.standard_normal()
        self._left_s = rng.exponential(SPELL_S)

    def quantiles(self, seconds: Floats) -> Floats:
        """Of requests that arrive at these times within the next second."""
        edges, moods = [self._left_s], [self._mood]
        while edges[-1] < 1.0:
            edges.append(edges[-1] + self._rng.exponential(SPELL_S))
            moods.append(self._rng.standard_normal())
        self._left_s, self._mood = edges[-1] - 1.0, moods[-1]
        mood = np.array(moods)[np.searchsorted(edges, seconds)]
        normal = self._own * self._rng.standard_normal(len(seconds)) + self._shared * mood
        uniform: Floats = np.minimum(np.interp(normal, *_NORMAL), np.nextafter(1.0, 0.0))
        return uniform


def _poisson(rng: np.random.Generator, rate: float, start: float, end: float) -> Floats:
    seconds = rng.random(rng.poisson(rate * (end - start)))
    seconds.sort()
    return start + (end - start) * seconds
