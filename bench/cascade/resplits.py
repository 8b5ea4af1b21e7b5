"""Whether a promise is kept on other texts: the choice is made again on many other splits of the same readings.

One split says what one operator got. Many say how often the next one gets less than the margin promises. Models are
asked for each text once, whatever the number of splits: a choice on some texts, and the texts that it is tested on, are
rows of what was read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pliant.bench.cascade import outcome
from pliant.bench.cascade.readings import Readings
from pliant.bench.cascade.tasks import Splits
from pliant.bench.report import Figure
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.readings import Level, Reader, Seen
from pliant.deployments.cascade.table import CascadeTable
from pliant.policies.cascade.candidates import Candidate
from pliant.texts import Text

_ROUTING = 0
"""The seed of the routing that is profiled and tested."""


class Remembering:
    """A reader that reads what it has read before from memory, with the latency that it had."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._seen: dict[tuple[str, Text, bool, tuple[int, ...]], Seen] = {}

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        key = service, text, importance, tuple(exits)
        if key not in self._seen:
            self._seen[key] = await self._reader.read(service, text, importance, exits)
        return self._seen[key]


@dataclass(frozen=True)
class Resplit:
    """What one split chose, and what that did on the texts that it had not seen."""

    loss: float
    """What the operator gave up of the most accurate model's accuracy."""
    candidate: Candidate
    spare: float
    """Its accuracy there less the target, which is the most accurate model's there less the loss."""


def resplits(
    reader: Reader,
    levels: Sequence[Level],
    splits: Splits,
    count: int,
    losses: Sequence[float],
    handed_s: Mapping[str, float],
    choose: Callable[[CascadeTable, float], Candidate],
    tell: Callable[[str, float], object],
) -> list[Resplit]:
    """`count` times, with texts dealt anew to splits as large as those given: what `choose` takes for each of `losses`,
    and what it comes to. Nobody has learned from these texts, which take `handed_s` longer from another model."""
    remembering = Remembering(reader)
    texts, choosing = [*splits.choose, *splits.test], len(splits.choose)
    found = []
    for seed in range(count):
        tell("other splits", seed / count)
        dealt = random.Random(seed).sample(texts, len(texts))
        chosen_on, tested_on = dealt[:choosing], dealt[choosing:]
        table = asyncio.run(profile(remembering, levels, chosen_on, _ROUTING, True, _quiet, handed_s)).table
        test = Readings(remembering, levels, tested_on, _quiet)
        large = test.right(test.whole[table.levels[table.best].name])
        for loss in losses:
            candidate = choose(table, loss)
            (routed,) = outcome.outcomes(candidate, test, [_ROUTING])
            found.append(Resplit(loss, candidate, float(routed.right.mean() - large.mean()) + loss))
    return found


def figure(name: str, found: Sequence[Resplit], target: str) -> Figure:
    """How often what was chosen under one loss kept the promise."""
    kept = float(np.mean([one.spare >= 0 for one in found])) if found else 0.0
    gated = [one for one in found if one.candidate.gate is not None]
    cascades = sum(len(one.candidate.levels) > 1 for one in found)
    worst = max([0.0, *(-one.spare for one in found)])
    said = (
        f"of {len(found)} splits; {cascades} chose a cascade; {len(gated)} chose a gate, with which "
        f"{sum(one.spare >= 0 for one in gated)} kept it; the worst missed by {worst:.2%}"
    )
    return Figure(name, kept, kept, kept, target, said)


def _quiet(_what: str, _done: float) -> None: ...
