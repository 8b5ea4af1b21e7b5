"""Tables of models of some skill, and what a cascade of them does, by loops that follow the paper (Tabi §5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.tables import LevelProfile, Reading
from pliant.policies.encoder.confidence import softmax

SKILLS = {"tiny": 1.5, "small": 2.5, "middle": 3.2, "large": 4.0}
LATENCY_S = {"tiny": 0.001, "small": 0.002, "middle": 0.004, "large": 0.006}
HANDED_S = {name: 0.05 * seconds for name, seconds in LATENCY_S.items()}


def logits(name: str, labels: Integers, seed: int, classes: int = 4) -> Floats:
    """Of a model of some skill; what is hard is hard for all models."""
    shared, own = np.random.default_rng(seed), np.random.default_rng([seed, len(name), ord(name[0])])
    hard = shared.exponential(1.0, len(labels))
    table = 0.7 * shared.normal(size=(len(labels), classes)) + 0.8 * own.normal(size=(len(labels), classes))
    table[np.arange(len(labels)), labels] += SKILLS[name] - hard
    return 1.5 * table


def true_labels(seed: int, texts: int, classes: int = 4) -> Integers:
    return np.random.default_rng(seed).integers(classes, size=texts)


def profile(name: str, labels: Integers, seed: int) -> LevelProfile:
    spread = np.random.default_rng(seed).uniform(0.5, 1.5, len(labels))
    reading = Reading(softmax(logits(name, labels, seed), 1.2), LATENCY_S[name] * spread)
    return LevelProfile(name, 1.2, reading, handed_s=HANDED_S[name])


def profiles(labels: Integers, seed: int, names: Sequence[str] = ("large", "tiny", "small")) -> list[LevelProfile]:
    return [profile(name, labels, seed) for name in names]


class Rereader:
    """Pruning to alpha takes a fifth of the time per 0.1, and confuses the reader more and more."""

    def __init__(self, labels: Integers, levels: Sequence[LevelProfile], harm: float = 0.02) -> None:
        self.calls: list[tuple[str, str, float]] = []
        self._labels = labels
        self._levels = {level.name: level.reading for level in levels}
        self._harm = harm

    def __call__(self, reader: str, pruner: str, alpha: float) -> Reading:
        self.calls.append((reader, pruner, alpha))
        whole = self._levels[reader]
        probabilities = whole.probabilities.copy()
        harmed = np.random.default_rng(1).permutation(len(self._labels))
        harmed = harmed[: int(self._harm * (alpha - 0.4) * len(harmed))]
        probabilities[harmed] = np.roll(np.eye(4), 1, axis=1)[self._labels[harmed]]
        return Reading(probabilities, whole.latency_s * 0.8)


def best_of(levels: Sequence[LevelProfile], labels: Integers) -> Reading:
    """That of the most accurate level, the fastest of such."""
    return min(
        (level.reading for level in levels),
        key=lambda reading: (-(reading.answers == labels).mean(), reading.latency_s.mean()),
    )


def plain_probability(sure: float, cutoff: float, slope: float) -> float:
    if sure <= cutoff:
        return 1.0
    return float(1 / (1 + np.exp(slope * ((sure - cutoff) / (1 - cutoff) - 0.5))))


def plain(
    candidate: Candidate,
    levels: Sequence[LevelProfile],
    labels: Integers,
    tokens: Integers | None = None,
    reread: Rereader | None = None,
) -> dict[str, float]:
    """What a candidate does, text by text and level by level.

    One with a gate needs `tokens`, the lengths of the texts, and one that prunes `reread`.
    """
    called = [next(level for level in levels if level.name == name) for name in candidate.levels]
    chain = [level.reading for level in called]
    if reread and any(candidate.alphas):
        pruner = [alpha > 0 for alpha in candidate.alphas].index(True)
        later = zip(candidate.levels[pruner + 1 :], candidate.alphas[pruner:], strict=True)
        chain[pruner + 1 :] = [reread(name, candidate.levels[pruner], alpha) for name, alpha in later]
    past = [
        tokens is not None and candidate.gate is not None and length > candidate.gate
        for length in ([0] * len(labels) if tokens is None else tokens.tolist())
    ]
    right = latency = early = early_gap = before_last = differing = 0.0
    best = best_of(levels, labels)
    reached_right = [[0.0] * (level + 1) for level in range(len(chain))]
    ends: list[tuple[float, float]] = []
    for text, label in enumerate(labels.tolist()):
        mass = float(not past[text])
        for level, reading in enumerate(chain):
            for voter in range(level + 1):
                reached_right[level][voter] += mass * (int(chain[voter].probabilities[text].argmax()) == label)
            if level < len(chain) - 1:
                mass *= plain_probability(
                    float(reading.probabilities[text].max()), candidate.cutoffs[level], candidate.slope
                )
    weights = [[share / (sum(row) or 1.0) for share in row] for row in reached_right]
    for text, label in enumerate(labels.tolist()):
        mass, seconds = float(not past[text]), 0.0
        if past[text]:
            whole = called[-1].reading
            right += int(whole.probabilities[text].argmax()) == label
            seconds = float(whole.latency_s[text]) + called[-1].handed_s
            latency += seconds
            ends.append((seconds, 1.0))
        for level, reading in enumerate(chain):
            if level and called[level].encoder and called[level].encoder == called[level - 1].encoder:
                seconds -= float(chain[level - 1].latency_s[text])
            elif level:
                seconds += called[level].handed_s
            seconds += float(reading.latency_s[text])
            on = 0.0
            if level < len(chain) - 1:
                on = plain_probability(
                    float(reading.probabilities[text].max()), candidate.cutoffs[level], candidate.slope
                )
            said = sum(
                weight * other.probabilities[text]
                for weight, other in zip(weights[level], chain[: level + 1], strict=True)
            )
            right += mass * (1 - on) * (int(np.argmax(said)) == label)
            if level < len(chain) - 1:
                before_last += mass * (1 - on)
                differing += mass * (1 - on) * (np.argmax(said) != called[-1].reading.probabilities[text].argmax())
            latency += mass * (1 - on) * seconds
            ends.append((seconds, mass * (1 - on)))
            if level == 0:
                early += mass * (1 - on) * (len(chain) > 1)
                if len(chain) > 1:
                    most = int(best.probabilities[text].argmax()) == label
                    early_gap += mass * (1 - on) * (most - (int(reading.probabilities[text].argmax()) == label))
            mass *= on
    texts = len(labels)
    return {
        "accuracy": right / texts,
        "mean_latency_s": latency / texts,
        "p75_latency_s": _quantile(ends, 0.75),
        "p99_latency_s": _quantile(ends, 0.99),
        "early_share": early / texts,
        "early_accuracy_gap": early_gap / early if early else 0.0,
        "early_difference": differing / before_last if before_last else 0.0,
    }


def _quantile(ends: Sequence[tuple[float, float]], share: float) -> float:
    """Of latencies with their probabilities."""
    total, passed = sum(mass for _, mass in ends), 0.0
    for seconds, mass in sorted(ends):
        passed += mass
        if passed >= share * total * (1 - 1e-12):  # as `weighted_quantile` has it: masses may end on the share
            return seconds
    return max(ends)[0]
