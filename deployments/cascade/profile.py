"""Profiles the levels of a cascade on labelled texts, and finds the cascades that they make (Tabi §5, offline).

Each level reads every text once, whole; texts are read again, pruned, only as the search for candidates asks for it.
All texts choose, and none is calibrated by its own label: the texts are dealt to FOLDS parts, and the probabilities of
each are those of a temperature that was fitted on the others (cross-fitting; the paper keeps a split for it). The one
that serves is fitted on all. Latencies are those of idle levels (`readings`), and where a text goes on to another
model, also what that takes. Plain asyncio: a `Reader` knows where the levels are.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Self

import numpy as np

from pliant.config.cascade import level_at
from pliant.deployments.cascade.pruning import Read
from pliant.deployments.cascade.pruning_agreement import NothingToCompareError, agreement
from pliant.deployments.cascade.readings import IN_A_ROW, Level, One, Progress, Reader, Readings, readable
from pliant.deployments.cascade.table import CascadeTable, LevelTable, Profiled, PruningAgreement
from pliant.errors import DataError
from pliant.policies.cascade.calibration import (
    Floats,
    Integers,
    expected_calibration_error,
    fit_temperature,
)
from pliant.policies.cascade.candidates import Candidate, find_candidates, weighted_quantile
from pliant.policies.cascade.cascade import Cascade, draws
from pliant.policies.cascade.label_agreement import LabelOrderError, check_agreement
from pliant.policies.cascade.tables import LevelProfile, Reading, reference
from pliant.policies.encoder.confidence import confidence as confidence_of
from pliant.policies.encoder.confidence import softmax
from pliant.texts import Pair, Text
from pliant.training.labelled_texts import FEWEST, LabelledText

logger = logging.getLogger("pliant")

FOLDS = 5
"""Parts that the texts are dealt to, to calibrate each on the others."""


async def profile(
    reader: Reader,
    levels: Sequence[Level],
    given: Sequence[LabelledText],
    seed: int,
    prune: bool,
    progress: Progress,
    handed_s: Mapping[str, float] | None = None,
) -> Profiled:
    """What the levels, in rising accuracy, and cascades of them do on texts in an order that says nothing of them.

    `seed` is the one that routes; `handed_s` is what texts from other models take longer (`LevelTable`), which is
    measured unless it is given. Raises DataError when nothing can be told from these texts, and what the reader
    raises.
    """
    readings = Readings(reader, levels, progress)
    found = await readings.whole([text.text for text in given])
    kept = readable(found)
    if len(kept) < FEWEST:
        raise DataError(
            f"{len(given) - len(kept)} of {len(given)} labelled texts are too long for a level; at least {FEWEST} that "
            "all of them take are needed"
        )
    truth = np.array([levels[0].labels.index(given[index].label) for index in kept])
    read = [_Level(name, [one for index in kept if (one := ones[index])], truth) for name, ones in found.items()]
    _check_labels(read)
    texts = [given[index].text for index in kept]
    if handed_s is None:
        decided_s = _decided_s(read, texts)
        handed_s = {name: seconds + decided_s for name, seconds in (await readings.handed_s(texts)).items()}
    candidates = await _find(read, handed_s, readings if prune and _all_tell(read) else None)
    progress("profiled", 1.0)
    table = CascadeTable(
        labels=levels[0].labels,
        seed=seed,
        texts=len(kept),
        left_out=len(given) - len(kept),
        pairs=isinstance(given[0].text, Pair),
        levels=tuple(level.table(handed_s[level.name]) for level in read),
        agreements=tuple(await asyncio.to_thread(_agreements, read)),
        candidates=tuple(candidates),
    )
    return Profiled(
        table=table,
        probabilities=np.stack([level.probabilities for level in read]),
        latency_s=np.stack([level.latency_s for level in read]),
        truth=truth,
        draws=draws(seed, texts, 0),
        given=np.array(kept),
        importance={level.name: level.words for level in read if level.words},
    )


@dataclass(frozen=True, eq=False)
class _Level:
    """A level on the whole texts that cascades are chosen on."""

    name: str
    ones: list[One]
    truth: Integers

    @cached_property
    def temperature(self) -> float:
        """Fitted on all texts."""
        return fit_temperature(self.logits, self.truth)

    @cached_property
    def temperatures(self) -> Floats:
        """Of each text, [n, 1]: fitted on the texts of other folds."""
        found = np.empty((len(self.ones), 1))
        folds = np.arange(len(self.ones)) % FOLDS
        for fold in range(FOLDS):
            others = folds != fold
            found[~others] = fit_temperature(self.logits[others], self.truth[others])
        return found

    @cached_property
    def logits(self) -> Floats:
        return np.stack([one.logits for one in self.ones])

    @cached_property
    def latency_s(self) -> Floats:
        return np.array([one.seconds for one in self.ones])

    @property
    def importance_s(self) -> Floats:
        return np.array([one.importance_s for one in self.ones])

    @cached_property
    def probabilities(self) -> Floats:
        """Calibrated."""
        return self.calibrated(self.logits)

    def calibrated(self, logits: Floats) -> Floats:
        """Probabilities from logits of the same texts, whole or pruned, [n, labels]."""
        return softmax(logits / self.temperatures)

    @cached_property
    def right(self) -> Floats:
        hits: Floats = (self.logits.argmax(axis=1) == self.truth).astype(np.float64)
        return hits

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def mean_latency_s(self) -> float:
        return float(self.latency_s.mean())

    @cached_property
    def words(self) -> list[Read]:
        """Of each text; none at all unless it tells of all of them."""
        told = [one.words for one in self.ones if one.words]
        return told if len(told) == len(self.ones) else []

    def table(self, handed_s: float) -> LevelTable:
        raw = confidence_of(softmax(self.logits))
        return LevelTable(
            name=self.name,
            temperature=self.temperature,
            accuracy=self.accuracy,
            calibration_error_before=expected_calibration_error(raw, self.right),
            calibration_error_after=expected_calibration_error(confidence_of(self.probabilities), self.right),
            mean_latency_s=self.mean_latency_s,
            p99_latency_s=weighted_quantile(self.latency_s, np.ones(len(self.ones)), 0.99),
            handed_s=handed_s,
        )


def _check_labels(levels: Sequence[_Level]) -> None:
    """Raise DataError when two levels seem to mean different things by the same labels."""
    best = levels[reference([level.accuracy for level in levels], [level.mean_latency_s for level in levels])]
    for level in levels:
        try:
            check_agreement(level.probabilities, best.probabilities)
        except LabelOrderError as error:
            raise DataError(f"{level.name} and {best.name}: {error}") from None


def _all_tell(levels: Sequence[_Level]) -> bool:
    """Whether each whole model that may be the first of several tells which words are important."""
    whole = [level for level in levels if level_at(level.name).exit is None]
    rising = sorted(whole, key=lambda level: (level.accuracy, level.mean_latency_s))
    if all(level.words for level in rising[:-1]):
        return True
    logger.warning(
        "texts are not pruned, as the levels are not listed in rising accuracy (%s), or one does not tell which words "
        "are important: list them so",
        ", ".join(f"{level.name} {level.accuracy:.1%}" for level in whole),
    )
    return False


def _agreements(levels: Sequence[_Level]) -> list[PruningAgreement]:
    """Of each level that tells with those after it that do, as far as their texts have words to compare."""
    found = []
    for pruner, other in combinations([level for level in levels if level.words], 2):
        with contextlib.suppress(NothingToCompareError):
            same = agreement(zip(pruner.words, other.words, strict=True))
            found.append(PruningAgreement(pruner=pruner.name, reader=other.name, **same._asdict()))
    return found


def _decided_s(levels: Sequence[_Level], texts: Sequence[Text]) -> float:
    """What it takes to decide on one text at one more level, and to have two vote; of some texts, the median."""
    two = levels[0], levels[-1]
    policy = Cascade((two[0].temperature, two[1].temperature), (0.5,), ((1.0,), (0.5, 0.5)))
    took = []
    for text, *said in zip(texts[:IN_A_ROW], *(level.logits for level in two), strict=False):
        started = time.perf_counter()
        both = policy.calibrated(said)
        policy.goes_on(text, 0, both[0])
        policy.vote(both)
        took.append(time.perf_counter() - started)
    return statistics.median(took)


async def _find(levels: Sequence[_Level], handed_s: Mapping[str, float], readings: Readings | None) -> list[Candidate]:
    """The candidates; without `readings` none prunes.

    The search runs in a thread, and texts are read in this loop whenever it asks for them.
    """
    named = {level.name: level for level in levels}
    profiles = [
        LevelProfile(
            level.name,
            level.temperature,
            Reading(level.probabilities, level.latency_s),
            level.importance_s,
            (at := level_at(level.name)).service,
            at.exit is None,
            handed_s[level.name],
        )
        for level in levels
    ]

    async def pruned(reader: str, pruner: str, alpha: float) -> Reading:
        assert readings
        level = named[reader]
        ones = await readings.pruned(reader, pruner, alpha, list(zip(named[pruner].ones, level.ones, strict=True)))
        logits = np.stack([one.logits for one in ones])
        return Reading(level.calibrated(logits), np.array([one.seconds for one in ones]))

    with _InLoop(pruned) as reread:
        tokens = np.array([one.tokens for one in levels[0].ones])
        return await asyncio.to_thread(find_candidates, profiles, levels[0].truth, reread if readings else None, tokens)


class _InLoop:
    """Lets a thread call `function` in this loop, until the context ends: then calls under way are cancelled."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Reading]]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._asked: list[concurrent.futures.Future[Reading]] = []
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __call__(self, *given: Any) -> Reading:
        if self._ended:
            raise concurrent.futures.CancelledError
        call = asyncio.run_coroutine_threadsafe(self._function(*given), self._loop)
        self._asked.append(call)
        if self._ended:  # meanwhile
            call.cancel()
        return call.result()

    def __exit__(self, *_: object) -> None:
        self._ended = True
        for call in self._asked:
            call.cancel()
