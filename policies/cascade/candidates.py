"""Which cascades there are, how accurate and how fast: found from stored tables of every model (Tabi §5).

Each model reads a labelled split once, whole. Chains of two models or more (the paper's have two or three), in rising
accuracy, are then evaluated from what was stored, over cut-offs from 0.95 down, until a chain is less accurate than its
models are on average; kept are those whose 75th percentile latency is within 1.5 times that of its slowest model. Only
pruned texts must be read anew, by the later levels, over a rising degree of pruning, until that loses them 2% of
accuracy.

Beside the paper:

- A chain is evaluated exactly over the draws that re-route: each text stops at each level with its probability. So no
  candidate owes its accuracy to a lucky seed.
- Pruning is tried for chains on the front of accuracy and latency as they are without, not for all.
- The words are chosen by any level of the chain but the last, which reads texts whole, as those before it do: a later
  one knows better which words matter, an earlier one prunes for more levels. (The paper takes one small model for all
  chains.) Either way the number of runs does not depend on the cut-offs.
- The slope k is swept as well. §4.1 says it is profiled, §5 leaves it out.
- Single models are candidates, of one level.
- Levels may be exits of one encoder: a text that goes on to the next is computed on, and not from its words. One that
  goes on to another model takes longer there than what that model reads by itself (`LevelProfile.handed_s`), and so
  does one that is past a gate.
- Chains of three models or more on the front are then tried with another cut-off for later levels than for the first.
- The cut-offs of candidates on the front are then moved, one at a time, in steps of a hundredth towards the next that
  was tried; what then is on the front is moved again.
- Candidates on the front are then tried with a gate: texts of more tokens, which would take two models long, go to the
  last level at once. Tried are some quantiles of lengths, and the longest that all levels together read within the last
  one's 99th percentile. A gate is kept where it shortens that of the candidate.
- Standard errors are those of two more texts, one for and one against (the rule of succession): that all of a hundred
  texts went well does not make it certain that others do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.cascade.cascade import SLOPE, Cascade, ensemble_weights, reroute_probability, vote
from pliant.policies.cascade.tables import LevelProfile, Reading, Reread, check, check_reading, reference
from pliant.policies.encoder.accuracy_loss import loss_error

CUTOFFS = tuple(round(0.95 - 0.05 * step, 2) for step in range(19))
ALPHAS = tuple(round(0.5 + 0.1 * step, 1) for step in range(11))
"""How far words are pruned, rising; a word goes when it gets less than so many times the mean attention."""
SECOND_STEP = 2
"""Of the cut-offs, every second is tried for later levels."""
FINE_STEP, FINE_STEPS = 0.01, 4
"""By how much the cut-offs of candidates on the front are moved, and how often to either side."""
MOVES = 2
"""How often a candidate on the front is moved: each time, one cut-off of it."""
SLOPES = (SLOPE, 4 * SLOPE)
GATES = (0.5, 0.75, 0.9, 0.95, 0.99)
"""Shares of the texts that are no longer than the gates that are tried."""
READER_LOSS = 0.02
TAIL, TAIL_FACTOR = 0.75, 1.5
ROUNDING = 1e-9


@dataclass(frozen=True)
class Candidate:
    """A cascade, or a single model, and what it does on the split it was found on. Shares and accuracies are 0 to 1."""

    levels: tuple[str, ...]
    cutoffs: tuple[float, ...]
    """From each level but the last to the next one."""
    alphas: tuple[float, ...]
    """How far texts are pruned for each level but the first; 0 leaves them whole. See `pruner`."""
    temperatures: tuple[float, ...]
    weights: tuple[tuple[float, ...], ...]
    """Those of levels 0 to j in the vote on a text that stops at level j."""
    slope: float
    accuracy: float
    accuracy_error: float
    """Its standard error."""
    loss: float
    """Accuracy below the best single model's (`tables.reference`); negative when above."""
    loss_error: float
    """Its standard error: far smaller, as both are measured on the same texts; 0 for the best single model itself."""
    mean_latency_s: float
    p75_latency_s: float
    p99_latency_s: float
    shares: tuple[float, ...]
    """Of the texts that stop at each level."""
    early_accuracy_gap: float
    """By how much the best single model is more accurate than the first level on those texts that this one answers; 0
    for a single model, which answers none early."""
    gate: int | None = None
    """In tokens, as the first of all profiled levels counts them: a longer text is read by the last level alone, whole.
    None: all texts begin at the first level."""
    gated_share: float = 0.0
    """Of the texts that are longer than the gate; they stop at the last level."""
    early_difference: float = 0.0
    """The share of texts that are answered before the last level of which that one, reading them whole, says something
    else; 0 for a single model."""

    @property
    def pruner(self) -> int | None:
        """The level that says which words are important: the last that reads texts whole. None: all read them whole."""
        return _pruner(self.alphas)

    @property
    def before_last(self) -> float:
        """The share of texts that are answered before the last level."""
        return sum(self.shares[:-1])

    @property
    def early_share(self) -> float:
        """Of the texts that the first level of several answers."""
        return self.shares[0] if len(self.shares) > 1 else 0.0

    @property
    def reached(self) -> tuple[float, ...]:
        """Of the texts that get to each level by way of those before it, and so not past the gate."""
        return tuple(max(0.0, sum(self.shares[level:]) - self.gated_share) for level in range(len(self.levels)))

    def cascade(self, seed: int) -> Cascade:
        """How texts pass through it live."""
        return Cascade(self.temperatures, self.cutoffs, self.weights, self.slope, seed)

    def __str__(self) -> str:
        chain = " → ".join(self.levels)
        return chain if self.gate is None else f"{chain} (over {self.gate} tokens: {self.levels[-1]})"


def find_candidates(
    levels: Sequence[LevelProfile],
    labels: ArrayLike,
    reread: Reread | None = None,
    tokens: ArrayLike | None = None,
    cutoffs: Sequence[float] = CUTOFFS,
    slopes: Sequence[float] = SLOPES,
) -> list[Candidate]:
    """All that are worth keeping; `labels` [n] are the true classes, `tokens` [n] the lengths of the texts.

    Without `reread`, none prunes; without `tokens`, none has a gate. Raises ValueError for tables that do not fit
    together.
    """
    truth, lengths = np.asarray(labels), None if tokens is None else np.asarray(tokens)
    check(levels, truth, lengths)
    search = _Search(levels, truth, cutoffs, slopes)
    found = [search.single(level) for level in levels]
    lengths_of_chains = range(2, len(levels) + 1)
    chains = [chain for length in lengths_of_chains for chain in combinations(search.rising, length) if _goes_on(chain)]
    for chain in chains:
        found += search.sweep(chain, _whole(chain), [level.reading for level in chain])
    on_front = {candidate.levels for candidate in front(found)}
    promising = [chain for chain in chains if tuple(level.name for level in chain) in on_front]
    for chain in promising:
        if len(chain) > 2:
            found += search.apart(chain)
    if reread is not None:
        ladders = _Ladders(search, reread)
        for chain in promising:
            if all(level.whole for level in chain):
                for alphas, readings in ladders.of(chain):
                    found += search.sweep(chain, alphas, readings)
    for _ in range(MOVES):
        found += search.moved(front(found))
    if lengths is not None:
        for candidate in front(found):
            found += search.gated(candidate, lengths)
    return found


def _goes_on(chain: Sequence[LevelProfile]) -> bool:
    """Whether no level has been passed by those before it."""
    return all(
        not _continued(one, other) or (other.reading.latency_s > one.reading.latency_s).all()
        for one, other in pairwise(chain)
    )


def _pruner(alphas: Sequence[float]) -> int | None:
    return next((level for level, alpha in enumerate(alphas) if alpha), None)


def _whole(chain: Sequence[LevelProfile]) -> tuple[float, ...]:
    """Alphas of a chain that leaves texts whole."""
    return (0.0,) * (len(chain) - 1)


def _continued(one: LevelProfile, other: LevelProfile) -> bool:
    """Whether a text goes from `one` to `other` through the encoder of both."""
    return one.encoder is not None and one.encoder == other.encoder


def _added_s(chain: Sequence[LevelProfile], readings: Sequence[Reading]) -> list[Floats]:
    """What each level takes of a text that it gets, [n] each, beyond what the level before has taken."""
    return [
        reading.latency_s - readings[level - 1].latency_s
        if level and _continued(chain[level - 1], chain[level])
        else reading.latency_s + (chain[level].handed_s if level else 0.0)
        for level, reading in enumerate(readings)
    ]


def front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that none beats in both accuracy and mean latency, the fastest first."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.mean_latency_s, -one.accuracy)):
        if not best or candidate.accuracy > best[-1].accuracy:
            best.append(candidate)
    return best


def weighted_quantile(values: ArrayLike, weights: ArrayLike, share: float) -> float:
    """The least value that, with all lesser ones, has at least `share` of the weight."""
    numbers, masses = np.ravel(values), np.ravel(weights)
    order = np.argsort(numbers, kind="stable")
    total = np.cumsum(masses[order])
    place = np.searchsorted(total, share * total[-1] * (1 - 1e-12))
    return float(numbers[order[place]])


@dataclass(frozen=True, eq=False)
class _Swept:
    """A chain of which cut-offs are tried."""

    chain: Sequence[LevelProfile]
    alphas: tuple[float, ...]
    """As a candidate's."""
    readings: Sequence[Reading]
    """Of later levels, on texts pruned so."""
    least: float
    """Accuracy, and the most that its 75th percentile latency may be, of candidates that are kept."""
    most_s: float

    @cached_property
    def way_s(self) -> Floats:
        """What each text has taken once each level has read it, [levels, n]."""
        taken: Floats = np.cumsum(_added_s(self.chain, self.readings), axis=0)
        pruner = _pruner(self.alphas)
        if pruner is not None and (importance_s := self.chain[pruner].importance_s) is not None:
            taken[pruner + 1 :] += importance_s
        return taken

    def voted(self, level: int, weights: Sequence[float]) -> Integers:
        """The class that the vote of all levels up to this one gives each text, [n]: theirs where they are at one."""
        answers = self.readings[0].answers.copy()
        if level:
            split, said = self._split[level - 1]
            answers[split] = vote(said, weights).argmax(axis=1)
        return answers

    @cached_property
    def _split(self) -> list[tuple[Integers, Floats]]:
        """For each level but the first, the texts on which those up to there differ, and what each says of them,
        [levels, texts, classes]."""
        found = []
        answers = np.stack([reading.answers for reading in self.readings])
        for level in range(1, len(self.readings)):
            split = np.flatnonzero((answers[1 : level + 1] != answers[0]).any(axis=0))
            found.append((split, np.stack([reading.probabilities[split] for reading in self.readings[: level + 1]])))
        return found


class _Search:
    """Evaluates chains on one split."""

    def __init__(
        self,
        levels: Sequence[LevelProfile],
        labels: NDArray[np.integer],
        cutoffs: Sequence[float],
        slopes: Sequence[float],
    ) -> None:
        self._labels = labels
        self._cutoffs = sorted(cutoffs, reverse=True)
        self._slopes = slopes
        accuracies = [self.accuracy(level.reading) for level in levels]
        means = [float(level.reading.latency_s.mean()) for level in levels]
        self.rising = [levels[index] for index in sorted(range(len(levels)), key=lambda i: (accuracies[i], means[i]))]
        self._reference = levels[reference(accuracies, means)]
        self._best = self.right(self._reference.reading.answers)
        self._swept: dict[tuple[tuple[str, ...], tuple[float, ...]], _Swept] = {}
        """By names of levels and alphas."""
        self._tried: set[tuple[_Swept, tuple[float, ...], float]] = set()
        """Cut-offs and slopes."""

    def right(self, answers: Integers) -> Floats:
        """1 for each text whose answer is the true class, else 0."""
        hits: Floats = (answers == self._labels).astype(np.float64)
        return hits

    def accuracy(self, reading: Reading) -> float:
        return float(self.right(reading.answers).mean())

    def single(self, level: LevelProfile) -> Candidate:
        return self._evaluate(self._limits((level,), (), [level.reading]), (), self._slopes[0])

    def apart(self, chain: Sequence[LevelProfile]) -> Iterator[Candidate]:
        """The chain of three or more on whole texts, where the cut-off of later levels is not that of the first."""
        for second in self._cutoffs[::SECOND_STEP]:
            for candidate in self.sweep(chain, _whole(chain), [level.reading for level in chain], second):
                if candidate.cutoffs[0] != second:
                    yield candidate

    def sweep(
        self,
        chain: Sequence[LevelProfile],
        alphas: tuple[float, ...],
        readings: Sequence[Reading],
        second: float | None = None,
    ) -> Iterator[Candidate]:
        """The chain over falling cut-offs, of later levels `second` if given, which read texts pruned by `alphas`."""
        swept = self._swept.setdefault(
            (tuple(level.name for level in chain), alphas), self._limits(chain, alphas, readings)
        )
        for slope in self._slopes:
            for cutoff in self._cutoffs:
                later = (cutoff if second is None else second,) * (len(chain) - 2)
                candidate = self._try(swept, (cutoff, *later), slope)
                if candidate.accuracy < swept.least:
                    break
                if candidate.p75_latency_s <= swept.most_s:
                    yield candidate

    def moved(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Each with one of its cut-offs moved, as far as that was not tried."""
        for one in candidates:
            for place, cutoff in enumerate(one.cutoffs):
                swept = self._swept[one.levels, one.alphas]
                for step in range(-FINE_STEPS, FINE_STEPS + 1):
                    near = round(cutoff + step * FINE_STEP, 2)
                    cutoffs = (*one.cutoffs[:place], near, *one.cutoffs[place + 1 :])
                    if 0 < near < 1 and (swept, cutoffs, one.slope) not in self._tried:
                        candidate = self._try(swept, cutoffs, one.slope)
                        if candidate.accuracy >= swept.least and candidate.p75_latency_s <= swept.most_s:
                            yield candidate

    def _limits(self, chain: Sequence[LevelProfile], alphas: tuple[float, ...], readings: Sequence[Reading]) -> _Swept:
        least = float(np.mean([self.accuracy(level.reading) for level in chain])) - ROUNDING
        slowest = max((level.reading.latency_s for level in chain), key=lambda latency: float(latency.mean()))
        most_s = (1 + ROUNDING) * TAIL_FACTOR * weighted_quantile(slowest, np.ones_like(slowest), TAIL)
        return _Swept(chain, alphas, readings, least, most_s)

    def _try(self, swept: _Swept, cutoffs: tuple[float, ...], slope: float) -> Candidate:
        self._tried.add((swept, cutoffs, slope))
        return self._evaluate(swept, cutoffs, slope)

    def gated(self, candidate: Candidate, tokens: Integers) -> Iterator[Candidate]:
        """The same with each gate that shortens its 99th percentile, of texts of `tokens` [n]."""
        if not candidate.cutoffs:
            return
        swept = self._swept[candidate.levels, candidate.alphas]
        gates = np.quantile(tokens, GATES, method="inverted_cdf").tolist()
        last = swept.chain[-1].reading.latency_s
        slow = swept.way_s[-1] > weighted_quantile(last, np.ones_like(last), 0.99)
        if slow.any() and (quick := tokens[tokens < tokens[slow].min()]).size:
            gates.append(quick.max())
        for gate in sorted(set(gates)):
            gated = self._evaluate(swept, candidate.cutoffs, candidate.slope, tokens > gate)
            if gated.p99_latency_s < candidate.p99_latency_s:
                yield replace(gated, gate=int(gate))

    def _evaluate(
        self, swept: _Swept, cutoffs: tuple[float, ...], slope: float, gated: NDArray[np.bool_] | None = None
    ) -> Candidate:
        """Where texts that are `gated` [n] begin, and end, at the last level."""
        chain, readings, texts = swept.chain, swept.readings, len(self._labels)
        past = np.zeros(texts) if gated is None else gated.astype(np.float64)
        alone = not cutoffs
        hits = [self.right(reading.answers) for reading in readings]
        reached, expected = 1 - past, past * self.right(chain[-1].reading.answers)
        stops, weights, differing_early = [], [], 0.0
        for level, reading in enumerate(readings):
            onward = reroute_probability(reading.confidence, cutoffs[level], slope) if level < len(cutoffs) else 0.0
            stops.append(reached * (1 - onward))
            weights.append(ensemble_weights(hits[: level + 1], reached))
            voted = swept.voted(level, weights[level])
            expected += stops[level] * self.right(voted)
            if level < len(cutoffs):
                differing_early += float(stops[level] @ (voted != chain[-1].reading.answers))
            reached = reached * onward
        mass = np.stack(stops)
        mass[-1] += past
        *earlier, latest = swept.way_s
        latency = np.stack([*earlier, np.where(past, chain[-1].reading.latency_s + chain[-1].handed_s, latest)])
        right, lost = float(expected.sum()), float((self._best - expected).sum())
        differing = float((expected * (1 - self._best) + (1 - expected) * self._best).sum())
        early_gap = 0.0 if alone else float(mass[0] @ (self._best - hits[0]) / (mass[0].sum() or 1.0))
        return Candidate(
            levels=tuple(level.name for level in chain),
            cutoffs=cutoffs,
            alphas=swept.alphas,
            temperatures=tuple(level.temperature for level in chain),
            weights=tuple(weights),
            slope=slope,
            accuracy=right / texts,
            accuracy_error=sqrt((right + 1) * (texts - right + 1) / texts) / (texts + 2),
            loss=lost / texts,
            loss_error=0.0 if chain[0] is self._reference and alone else loss_error(lost, differing, texts),
            mean_latency_s=float((mass * latency).sum() / texts),
            p75_latency_s=weighted_quantile(latency, mass, TAIL),
            p99_latency_s=weighted_quantile(latency, mass, 0.99),
            shares=tuple(mass.mean(axis=1).tolist()),
            early_accuracy_gap=early_gap,
            early_difference=differing_early / (float(mass[:-1].sum()) or 1.0),
            gated_share=float(past.mean()),
        )


class _Ladders:
    """Rising degrees of pruning for each pair of a pruner and a reader, read once and only when asked for."""

    def __init__(self, search: _Search, reread: Reread) -> None:
        self._search = search
        self._reread = reread
        self._known: dict[tuple[str, str], dict[float, Reading]] = {}

    def of(self, chain: Sequence[LevelProfile]) -> Iterator[tuple[tuple[float, ...], list[Reading]]]:
        """Alphas of each level that may prune for all after it, as far as none of these loses too much by that; with
        the readings of all levels."""
        for place, pruner in enumerate(chain[:-1]):
            ladders = [self._ladder(pruner, reader) for reader in chain[place + 1 :]]
            whole = [level.reading for level in chain[: place + 1]]
            for alpha in min(ladders, key=len):
                yield (0.0,) * place + (alpha,) * len(ladders), [*whole, *(ladder[alpha] for ladder in ladders)]

    def _ladder(self, pruner: LevelProfile, reader: LevelProfile) -> dict[float, Reading]:
        pair = pruner.name, reader.name
        if pair not in self._known:
            self._known[pair] = ladder = {}
            whole = self._search.accuracy(reader.reading)
            for alpha in ALPHAS:
                reading = self._reread(reader.name, pruner.name, alpha)
                check_reading(reading, reader.reading.probabilities.shape, f"{reader.name} on pruned texts")
                if whole - self._search.accuracy(reading) > READER_LOSS:
                    break
                ladder[alpha] = reading
        return self._known[pair]
