"""What a task's models say of the test split: each reads every text once, and again where words are pruned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pliant.bench.cascade.tasks import Texts
from pliant.deployments.cascade import readings
from pliant.deployments.cascade.readings import Level, One, Progress, Reader
from pliant.policies.cascade.calibration import Floats, Integers


@dataclass(frozen=True, eq=False)
class Read:
    """A model on the texts of a split."""

    ones: Sequence[One]

    @cached_property
    def logits(self) -> Floats:
        """[n, labels]"""
        return np.stack([one.logits for one in self.ones])

    @cached_property
    def seconds(self) -> Floats:
        """[n]; of pruned texts with the pruning."""
        return np.array([one.seconds for one in self.ones])

    @cached_property
    def compute_s(self) -> Floats:
        """What the model itself takes of it, [n]."""
        return np.array([one.compute_s for one in self.ones])

    @cached_property
    def importance_s(self) -> Floats:
        """What it takes beyond that to know which words are important, [n]."""
        return np.array([one.importance_s for one in self.ones])


class Readings:
    """All `levels` on `texts`; a pruned reading is made when it is first asked for, and kept."""

    def __init__(self, reader: Reader, levels: Sequence[Level], texts: Texts, progress: Progress) -> None:
        self.texts = [text.text for text in texts]
        self.truth: Integers = np.array([levels[0].labels.index(text.label) for text in texts])
        self._readings = readings.Readings(reader, levels, progress)
        found = asyncio.run(self._readings.whole(self.texts))
        self.whole = {name: Read([one for one in ones if one]) for name, ones in found.items()}
        """By model, on the texts as they are."""
        self._pruned: dict[tuple[str, str, float], Read] = {}

    def pruned(self, reader: str, pruner: str, alpha: float) -> Read:
        """`reader` on the texts less the words that `pruner` gave too little attention; with an alpha of 0, whole."""
        if alpha == 0:
            return self.whole[reader]
        key = reader, pruner, alpha
        if key not in self._pruned:
            given = [*zip(self.whole[pruner].ones, self.whole[reader].ones, strict=True)]
            self._pruned[key] = Read(asyncio.run(self._readings.pruned(reader, pruner, alpha, given)))
        return self._pruned[key]

    def right(self, read: Read) -> Floats:
        """1 for each text whose likeliest label is the true one, else 0."""
        hits: Floats = (read.logits.argmax(axis=1) == self.truth).astype(np.float64)
        return hits
