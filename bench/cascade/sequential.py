"""One text after the other, through real runtimes: what each system takes from text to label (Tabi §7.1).

Tokenization counts, and with a cascade its decisions, pruning, the second tokenization and the vote.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.bench.cascade.compiled import Model
from pliant.deployments.cascade.pruning import prune, read_words
from pliant.deployments.cascade.readings import IN_A_ROW
from pliant.deployments.encoder.messages import ImportanceRequest
from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.candidates import Candidate
from pliant.texts import Text

System = Callable[[Text], float]
"""Answers a text, and gives what that costs in bytes times seconds: the paper's estimate (Tabi §7.1), which charges for
each model the time that it computes, by the share of the machine that it takes; here, by the size of its weights."""


@dataclass(frozen=True, eq=False)
class Timed:
    """What one system takes, [passes, texts]."""

    seconds: Floats
    cost: Floats
    """In bytes of weights times seconds of the model that has them."""

    @property
    def by_text(self) -> Floats:
        """The median of seconds over passes: what else the machine does is gone, what the text costs is not."""
        medians: Floats = np.median(self.seconds, axis=0)
        return medians

    @property
    def means(self) -> list[float]:
        """Seconds for a text, by pass."""
        means: list[float] = self.seconds.mean(axis=1).tolist()
        return means

    @property
    def costs(self) -> list[float]:
        """For a text, by pass."""
        costs: list[float] = self.cost.mean(axis=1).tolist()
        return costs

    @property
    def p99s(self) -> list[float]:
        """Seconds that 1% of texts take longer than, by pass."""
        quantiles: list[float] = np.quantile(self.seconds, 0.99, axis=1).tolist()
        return quantiles


def alone(model: Model) -> System:
    """The model answers."""

    def answer(text: Text) -> float:
        started = time.perf_counter()
        model.read(model.encode(text)).argmax()
        return model.bytes * (time.perf_counter() - started)

    return answer


def cascade(candidate: Candidate, models: Mapping[str, Model], seed: int) -> System:
    """As the service does it: the level by which texts are pruned tells of those that will go on, and the last one
    alone reads those that are longer than the gate, as the first of all `models` counts."""
    policy = candidate.cascade(seed)
    levels = [models[name] for name in candidate.levels]
    counted_by = next(iter(models.values()))
    by_itself = alone(levels[-1])

    def wanted(text: Text, level: int) -> Callable[[np.ndarray], bool]:
        if level != candidate.pruner:
            return lambda _: False
        return ImportanceRequest(policy.temperatures[level], policy.sure_from(text, level)).wants

    def answer(text: Text) -> float:
        if candidate.gate is not None and len(counted_by.encode(text)) > candidate.gate:
            return by_itself(text)
        words, said, cost = None, [], 0.0
        for level, model in enumerate(levels):
            started = time.perf_counter()
            encoding = model.encode(prune(words, candidate.alphas[level - 1]).text if words else text)
            told = model.with_importance(encoding, wanted(text, level))
            if told.importance is not None:
                words = read_words(text, encoding, told.importance)
            said += [*policy.calibrated(told.logits[None], level)]
            cost += model.bytes * (time.perf_counter() - started)
            if not policy.goes_on(text, level, said[-1]):
                break
        policy.vote(said).argmax()
        return cost

    return answer


def run(
    systems: Mapping[str, System], texts: Sequence[Text], passes: int, done: Callable[[], object]
) -> dict[str, Timed]:
    """All systems on a few texts in turn, in another order each time, in so many passes over all texts.

    As each has several texts in a row, its weights are in the processor's caches as much as when it has the machine.
    """
    rng = random.Random(0)
    timed = {name: Timed(*np.zeros((2, passes, len(texts)))) for name in systems}
    for number in range(passes):
        for start in range(0, len(texts), IN_A_ROW):
            done()
            for name in rng.sample(list(systems), len(systems)):
                for place in range(start, min(start + IN_A_ROW, len(texts))):
                    started = time.perf_counter()
                    timed[name].cost[number, place] = systems[name](texts[place])
                    timed[name].seconds[number, place] = time.perf_counter() - started
    return timed
