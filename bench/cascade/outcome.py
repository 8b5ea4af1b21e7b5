"""What a cascade does on texts that nothing was chosen on: exactly what the service decides, from stored readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pliant.bench.cascade.readings import Read, Readings
from pliant.deployments.cascade.pruning import prune
from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.cascade.candidates import Candidate


@dataclass(frozen=True, eq=False)
class Outcome:
    """A cascade on the texts of a split, under one seed."""

    stops: Integers
    """The level that answers each text, [n]."""
    right: Floats
    """1 for each text that is answered with the true label, else 0."""
    early: Floats
    """1 for each text that the first of several levels answers, else 0."""


@dataclass(frozen=True, eq=False)
class Pruning:
    """What pruning does to the texts that go on to the last level, [n] each; to no text, if nothing is pruned."""

    words: Integers
    pruned: Integers
    """Of these words."""
    whole_s: Floats
    """What the last level's model takes for the whole text."""
    pruned_s: Floats
    """For what is left of it."""
    extra_s: Floats
    """What it takes to tell which words are important, and to leave out the others."""
    lost: Floats
    """1 where the last level is right on the whole text only, -1 where it is on what is left only, else 0."""

    @property
    def saved(self) -> float:
        """Of what the last level's model takes."""
        return 1 - float(self.pruned_s.sum() / self.whole_s.sum()) if len(self.words) else 0.0

    @property
    def saved_net(self) -> float:
        """Of the same, with what it takes to prune."""
        return self.saved - float(self.extra_s.sum() / self.whole_s.sum()) if len(self.words) else 0.0

    @property
    def share(self) -> float:
        """Of words that are left out."""
        return float(self.pruned.sum() / self.words.sum()) if len(self.words) else 0.0

    @property
    def accuracy_lost(self) -> float:
        return float(self.lost.mean()) if len(self.words) else 0.0

    def of(self, rows: Integers) -> Pruning:
        """Of these texts."""
        return Pruning(*(column[rows] for column in vars(self).values()))


def reads(candidate: Candidate, readings: Readings) -> list[Read]:
    """What each level says of the texts that it would get."""
    first, *later = candidate.levels
    pruner = candidate.levels[candidate.pruner or 0]
    pruned = zip(later, candidate.alphas, strict=True)
    return [readings.whole[first], *(readings.pruned(name, pruner, alpha) for name, alpha in pruned)]


def past_gate(candidate: Candidate, readings: Readings) -> NDArray[np.bool_]:
    """Whether the last level alone reads a text, as it is longer than the gate, [n]."""
    if candidate.gate is None:
        return np.zeros(len(readings.texts), bool)
    counted_by = next(iter(readings.whole.values()))
    return np.array([one.tokens for one in counted_by.ones]) > candidate.gate


def outcomes(candidate: Candidate, readings: Readings, seeds: Sequence[int]) -> list[Outcome]:
    """The cascade, under each seed."""
    read, past = reads(candidate, readings), past_gate(candidate, readings)
    return [_outcome(candidate, readings, read, past, seed) for seed in seeds]


def _outcome(
    candidate: Candidate, readings: Readings, read: Sequence[Read], past: NDArray[np.bool_], seed: int
) -> Outcome:
    cascade, last = candidate.cascade(seed), len(candidate.levels) - 1
    alone = readings.whole[candidate.levels[last]].logits
    answers, stops = [], []
    for number, text in enumerate(readings.texts):
        if past[number]:
            answers.append(int(alone[number].argmax()))
            stops.append(last)
            continue
        said: list[Floats] = []
        while not said or cascade.goes_on(text, len(said) - 1, said[-1]):
            said += [*cascade.calibrated([read[len(said)].logits[number]], len(said))]
        answers.append(int(cascade.vote(said).argmax()))
        stops.append(len(said) - 1)
    right, stopped = (np.array(answers) == readings.truth).astype(np.float64), np.array(stops)
    return Outcome(stopped, right, ((stopped == 0) & (len(candidate.levels) > 1)).astype(np.float64))


def early_gap(early: Floats, lost: Floats) -> float:
    """The mean of `lost` over texts that are `early`, both [n]; 0 without any."""
    return float(early @ lost) / (float(early.sum()) or 1.0)


def seconds(candidate: Candidate, readings: Readings, stops: Integers) -> Floats:
    """How long each text takes, [n]: what each level takes that it reaches, and once what tells what to prune."""
    read, pruner = reads(candidate, readings), candidate.pruner
    total = read[0].seconds.copy()
    if pruner is not None:
        total += np.where(stops > pruner, read[pruner].importance_s, 0.0)
    for level, of in enumerate(read[1:], 1):
        total += np.where(stops >= level, of.seconds, 0.0)
    return np.where(past_gate(candidate, readings), readings.whole[candidate.levels[-1]].seconds, total)


def pruning(candidate: Candidate, readings: Readings, alpha: float) -> Pruning:
    """Of the texts that go on to the last level under seed 0, if they were pruned by `alpha`."""
    pruner, last = candidate.levels[candidate.pruner or 0], candidate.levels[-1]
    goes_on = outcomes(candidate, readings, [0])[0].stops >= len(candidate.levels) - 1
    reach = np.flatnonzero(goes_on & ~past_gate(candidate, readings))
    if alpha == 0 or pruner == last:
        reach = reach[:0]
    counts = np.zeros((2, len(reach)), int)
    for place, number in enumerate(reach.tolist()):
        words = readings.whole[pruner].ones[number].words
        assert words
        counts[:, place] = prune(words, alpha)[1:]
    whole, less = readings.whole[last], readings.pruned(last, pruner, alpha if len(reach) else 0.0)
    pruning_s = less.seconds - less.compute_s - (whole.seconds - whole.compute_s)
    return Pruning(
        words=counts[0],
        pruned=counts[1],
        whole_s=whole.compute_s[reach],
        pruned_s=less.compute_s[reach],
        extra_s=(readings.whole[pruner].importance_s + pruning_s)[reach],
        lost=(readings.right(whole) - readings.right(less))[reach],
    )
