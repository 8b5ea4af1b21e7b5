"""Queries as the paper makes them: table II's types, at a rate that swings between 0.35 and 1.2 of what gamma 0 takes.

Capacity is images per second at gamma 0 in the batches, of up to 64, that take the least per image. In an overload the
batches are filled, so that this is what comes of it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pliant.simulation.arrivals import Floats, Integers
from pliant.simulation.vision.outcome import Query

SWING = (0.35, 1.2)
"""Of the capacity: 200 and 700 requests per second against 580 (§V)."""

CALIBRATED_PEAK = 1 / 0.65
"""Of the capacity, at the peak: there gamma 0 answers 0.65 of what comes, as PetS does in the paper."""


class Kind(NamedTuple):
    """A line of table II."""

    role: int
    """Index of the task: CIFAR10, CIFAR100, EuroSAT."""
    latency_s: float
    utility: float


KINDS = (
    Kind(0, 0.6, 0.3),
    Kind(0, 1.0, 0.01),
    Kind(1, 0.6, 1.0),
    Kind(1, 1.0, 0.2),
    Kind(2, 0.6, 0.3),
    Kind(2, 1.0, 0.01),
)

_STEP = 0.2
"""Standard deviation of what the synthetic load changes by from one second to the next."""
_TWITTER = "twitter_trace/twitter_2min_days_1_5.csv"
_BINS_PER_DAY = 720


@dataclass(frozen=True)
class Trace:
    """Queries that arrive at random, at a mean rate for each second."""

    loads: tuple[float, ...]
    """By second, as multiples of the capacity."""
    seed: int

    def first(self, seconds: int) -> Trace:
        """A trace of its first loads; arrivals differ."""
        return Trace(self.loads[:seconds], self.seed)

    def peaking_at(self, load: float) -> Trace:
        """The same swings, with this load where SWING's end was."""
        return Trace(tuple(each * load / SWING[1] for each in self.loads), self.seed)

    def queries(self, per_s: float, roles: Sequence[str]) -> list[Query]:
        """In order of arrival, for a capacity of `per_s`, with tasks in table II's roles."""
        rng = np.random.default_rng(self.seed)
        numbers = rng.poisson(np.array(self.loads) * per_s)
        arrivals = np.repeat(np.arange(len(self.loads)), numbers) + rng.random(numbers.sum())
        arrivals.sort()
        kinds: Integers = rng.integers(len(KINDS), size=len(arrivals))
        chances: Floats = rng.random(len(arrivals))
        return [
            Query(index, at, at + KINDS[kind].latency_s, KINDS[kind].utility, roles[KINDS[kind].role], chance)
            for index, (at, kind, chance) in enumerate(
                zip(arrivals.tolist(), kinds.tolist(), chances.tolist(), strict=True)
            )
        ]


def synthetic(seconds: int, seed: int, scale: float = 1.0) -> Trace:
    """A load that wanders between the ends of SWING, and is anywhere as often; times `scale`."""
    low, high = SWING
    rng = np.random.default_rng([seed, 1])
    walk = rng.uniform(0, high - low) + np.cumsum(rng.normal(0, _STEP, seconds))
    folded = np.abs((walk + high - low) % (2 * (high - low)) - (high - low))
    return Trace(tuple((scale * (low + folded)).tolist()), seed)


def replay(data: Path | None, seconds: int, seed: int) -> Trace:
    """Requests of two minutes as those of a second, their range stretched to SWING; at most the trace's 120 hours.

    In `data`, Twitter's; else what looks like it: a day's curve with spikes to three times the rate.
    """
    counts = _stand_in() if data is None else _recorded(data / _TWITTER)
    low, high = SWING
    share = (counts - counts.min()) / (counts.max() - counts.min())
    return Trace(tuple((low + (high - low) * share[:seconds]).tolist()), seed)


def _recorded(path: Path) -> Floats:
    """The counts; those in holes, where nothing or only a part was recorded, are drawn between their neighbours."""
    with path.open(newline="") as file:
        counts = np.array([float(row["requests"]) for row in csv.DictReader(file)])
    empty = np.flatnonzero(counts == 0)
    holes = np.union1d(empty, np.clip(np.concatenate((empty - 1, empty + 1)), 0, len(counts) - 1))
    known = np.setdiff1d(np.arange(len(counts)), holes)
    filled: Floats = np.interp(np.arange(len(counts)), known, counts[known])
    return filled


def _stand_in() -> Floats:
    rng = np.random.default_rng(0)
    bins = np.arange(5 * _BINS_PER_DAY)
    counts = 7500 - 2500 * np.cos(2 * np.pi * bins / _BINS_PER_DAY) + rng.normal(0, 300, len(bins))
    for start in rng.choice(len(bins) - 5, 60, replace=False).tolist():
        counts[start : start + int(rng.integers(3, 6))] *= 3
    result: Floats = counts
    return result
