"""Which of a profile's cascades serves (Tabi §5, online), also where none keeps what the operator promises."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from pliant.config.cascade import CascadeConfig, ConformalConfig, level_at
from pliant.deployments.cascade.table import LevelTable, Profiled
from pliant.message import message
from pliant.policies.cascade.candidates import CUTOFFS, SLOPES, Candidate
from pliant.policies.cascade.choice import NoCandidateError, accurate, choose
from pliant.policies.cascade.conformal_cutoff import ConformalCutoffs, conformal_cutoffs


@message
class Choice(NamedTuple):
    """The cascade, or the single model, that serves."""

    candidate: Candidate
    unmet: str | None
    """What it does not keep of what was promised, and why; None if it keeps everything."""
    latency_s: tuple[float, ...]
    """What each of its levels adds on average to a whole text that gets there."""
    texts: int
    """That it was profiled on."""
    fallback: Candidate | None = None
    """What may answer when the first level cannot: the fastest of another service alone; None unless answers may
    degrade."""
    conformal: str | None = None
    """For people: what the conformal promise came to; None without one."""
    pairs: bool = False
    """Whether it was profiled on pairs of texts, and not on single ones."""
    taken_from: int = 0
    """Labelled texts of which only those `texts` chose it that are like what comes since a drift; 0: all chose it."""


def choose_for(config: CascadeConfig, profiled: Profiled) -> Choice:
    """The fastest that keeps accuracy, latency and conformal promise of `config`.

    If none does, a service that may degrade gives up latency first: of those that are accurate enough, the one of the
    least 99th percentile serves. If none is, the one of the least loss does, and of several such the fastest. Others
    raise NoCandidateError. The conformal promise is never given up, as the most accurate model alone always keeps it.
    """
    table = profiled.table
    allowed, promise = table.candidates, None
    if config.conformal:
        certified = _certified(config.conformal, profiled)
        allowed = tuple(one for one in allowed if _keeps(one, table.levels[table.best].name, certified))
        promise = _described(certified, config.conformal)
    unmet = None
    try:
        candidate = choose(allowed, config.accuracy_target, config.accuracy_loss, config.slo_ms)
    except NoCandidateError as error:
        if not config.degrade:
            raise
        candidate, unmet = _closest(config, allowed), str(error)
    return Choice(
        candidate=candidate,
        unmet=unmet,
        latency_s=_added_s(candidate, {level.name: level for level in table.levels}),
        texts=table.texts,
        fallback=_fallback(candidate, table.candidates) if config.degrade else None,
        conformal=promise,
        pairs=table.pairs,
    )


def _closest(config: CascadeConfig, allowed: tuple[Candidate, ...]) -> Candidate:
    if found := accurate(allowed, config.accuracy_target, config.accuracy_loss):
        return min(found, key=lambda one: one.p99_latency_s)
    return min(allowed, key=lambda one: (one.loss, one.mean_latency_s))


def _added_s(candidate: Candidate, tables: Mapping[str, LevelTable]) -> tuple[float, ...]:
    """An exit's mean is that of all layers up to there, of which the exit before has taken its own."""
    added = [tables[candidate.levels[0]].mean_latency_s]
    for before, level in pairwise(candidate.levels):
        table = tables[level]
        if level_at(before).service == level_at(level).service:
            added.append(max(0.0, table.mean_latency_s - tables[before].mean_latency_s))
        else:
            added.append(table.mean_latency_s + table.handed_s)
    return tuple(added)


def _fallback(candidate: Candidate, candidates: tuple[Candidate, ...]) -> Candidate | None:
    first = level_at(candidate.levels[0]).service
    others = [one for one in candidates if len(one.levels) == 1 and level_at(one.levels[0]).service != first]
    return min(others, key=lambda one: one.mean_latency_s, default=None)


_Certified = dict[tuple[str, float], ConformalCutoffs]
"""By first level and slope, for pairs that end in the most accurate level."""


def _certified(conformal: ConformalConfig, profiled: Profiled) -> _Certified:
    """Which early answers rarely differ from the most accurate level's.

    Delta is shared among all pairs and slopes, so that all may be chosen from; longer chains have no guarantee, nor do
    those with a gate, whose early answers are of short texts alone.
    """
    table = profiled.table
    answers = profiled.probabilities.argmax(axis=-1)
    delta = conformal.delta / ((len(table.levels) - 1) * len(SLOPES))
    return {
        (level.name, slope): conformal_cutoffs(
            profiled.confidence[index],
            profiled.draws,
            answers[index] != answers[table.best],
            conformal.epsilon,
            delta,
            CUTOFFS,
            slope,
        )
        for index, level in enumerate(table.levels)
        if index != table.best
        for slope in SLOPES
    }


def _keeps(candidate: Candidate, best: str, certified: _Certified) -> bool:
    """Whether it is the best level alone, or one of the certified pairs that end in it."""
    first, *later = candidate.levels
    if not later:
        return first == best
    return (
        later == [best]
        and candidate.gate is None
        and candidate.cutoffs[0] in certified[first, candidate.slope].certified
    )


def _described(certified: _Certified, conformal: ConformalConfig) -> str:
    """In a line, what came of each first level, with the slope that serves it best."""
    best: dict[str, ConformalCutoffs] = {}
    for (level, _), found in certified.items():
        known = best.setdefault(level, found)
        if (len(found.certified), found.early) > (len(known.certified), known.early):
            best[level] = found
    listed = "; ".join(f"{level} {found}" if found.certified else f"{level}: {found}" for level, found in best.items())
    return f"epsilon {conformal.epsilon:g}, delta {conformal.delta:g}: {listed}"
