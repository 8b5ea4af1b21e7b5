"""What the levels of a cascade say of labelled texts, one text after the other (Tabi §5).

A level's latency is that of an idle service, whatever else its clients ask of it meanwhile: what its model takes of
each text, and the median over texts of everything else (tokenizing, the way there and back), in which a queue would
show. A wait that only some texts meet so moves neither mean nor tail.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from pliant.config.cascade import level_at
from pliant.deployments.cascade.pruning import Read, prune, read_words
from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.label_agreement import columns
from pliant.texts import Text

_WARM_UP = 3
"""Texts that a level reads before its latency counts."""

Progress = Callable[[str, float], object]
"""Called with what is being done, and the share of it that is."""


class Seen(NamedTuple):
    """What a level says of one text."""

    logits: NDArray[np.float32]
    """[labels], in its own order."""
    importance: NDArray[np.float32] | None
    """[tokens]: the attention that each token of `encoding` received, if it was asked for and can be had."""
    encoding: Encoding
    seconds: float
    """From asking to the answer, without what importance took."""
    importance_s: float
    """What that took."""
    compute_s: float
    """Of `seconds`, what the model itself took: the rest is the way there and back, and whatever was in it."""
    earlier: Sequence[NDArray[np.float32]] = ()
    """What the exits that were asked have said, each as `logits`."""
    earlier_s: Sequence[float] = ()
    """Of `compute_s`, what it took up to each of them."""


class UnreadableError(Exception):
    """A level takes no such text: it is too long, or has no tokens."""


class Reader(Protocol):
    """Where the levels' services are. Raises UnreadableError, or anything else if one cannot be reached."""

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        """What all of its model says of `text`, and the `exits` behind so many of the layers."""


class Level(NamedTuple):
    """One that is profiled."""

    name: str
    labels: tuple[str, ...]
    """In the order of its logits."""
    importance: bool
    """Whether it can tell which words are important."""


class One(NamedTuple):
    """A text as a level has read it."""

    logits: Floats
    """[labels], in the order of the first level."""
    seconds: float
    """`compute_s` and what else a text of this level takes, less what depends on chance; of a pruned text with the time
    to prune it."""
    compute_s: float
    """What the model itself took."""
    words: Read | None
    """With their importance, if the level tells."""
    importance_s: float
    """What it takes to know them, beyond `seconds`: a text that is not pruned does without."""
    tokens: int
    """That the level has read."""


class Readings:
    """Reads through `reader`, and says to `progress` how far it is."""

    def __init__(self, reader: Reader, levels: Sequence[Level], progress: Progress) -> None:
        self._reader = reader
        self._levels = levels
        self._columns = {level.name: list(columns(levels[0].labels, level.labels)) for level in levels}
        self._progress = progress
        self._hop_s: dict[str, float] = {}
        """What a text of each level takes beside its model."""

    async def whole(self, texts: Sequence[Text]) -> dict[str, list[One | None]]:
        """By level, what it says of each of `texts`; None where it cannot take the text."""
        found: dict[str, list[One | None]] = {}
        services = list(dict.fromkeys(level_at(level.name).service for level in self._levels))
        for index, service in enumerate(services):
            levels = [level for level in self._levels if level_at(level.name).service == service]
            read: list[list[One | None]] = []
            for number, text in enumerate([*texts[:_WARM_UP], *texts]):
                done = (index + max(0, number - _WARM_UP) / len(texts)) / len(services)
                self._progress(f"{service} reads the labelled texts", done)
                read.append(await self._read(service, text, levels))
            for level, ones in zip(levels, zip(*read[_WARM_UP:], strict=True), strict=True):
                self._hop_s[level.name] = hop_s = _hop_s(ones)
                found[level.name] = [one and one._replace(seconds=one.compute_s + hop_s) for one in ones]
        return {level.name: found[level.name] for level in self._levels}

    async def pruned(self, level: str, pruner: str, alpha: float, given: Sequence[tuple[One, One]]) -> list[One]:
        """What `level` says of texts less the words that `pruner` gave too little attention; with the time to prune.

        `given` is each text as the pruner has read it, with importance, and as `level` has read it whole: that also
        goes for a text of which nothing is pruned, or whose rest it cannot take. What importance takes is not in it.
        """
        found = []
        reading = [Level(level, (), False)]
        for number, (pruner_reading, whole) in enumerate(given):
            self._progress(f"{level} reads texts pruned by {pruner}, alpha {alpha:g}", number / len(given))
            assert pruner_reading.words
            started = time.perf_counter()
            rest = prune(pruner_reading.words, alpha)
            prune_s = time.perf_counter() - started
            [one] = await self._read(level, rest.text, reading) if rest.pruned else [None]
            one = one or whole
            found.append(one._replace(seconds=one.compute_s + self._hop_s[level] + prune_s))
        return found

    async def _read(self, service: str, text: Text, levels: Sequence[Level]) -> list[One | None]:
        """As each of the service's `levels` has read it, all of its model last if it is one."""
        exits = [level_at(level.name).exit for level in levels]
        try:
            seen = await self._reader.read(
                service, text, any(level.importance for level in levels), [each for each in exits if each is not None]
            )
        except UnreadableError:
            return [None] * len(levels)
        words = None
        started = time.perf_counter()
        if seen.importance is not None:
            words = read_words(text, seen.encoding, seen.importance)
        importance_s = seen.importance_s + time.perf_counter() - started
        hop_s = seen.seconds - seen.compute_s
        said = [*zip(seen.earlier, seen.earlier_s, strict=True), (seen.logits, seen.compute_s)]
        return [
            One(
                logits.astype(np.float64)[self._columns[level.name]],
                hop_s + compute_s,
                compute_s,
                words if level.importance else None,
                importance_s if level.importance else 0.0,
                len(seen.encoding),
            )
            for level, (logits, compute_s) in zip(levels, said, strict=False)
        ]


def _hop_s(read: Sequence[One | None]) -> float:
    """The median, over the texts that could be read, of what they took beside the model."""
    return max(0.0, statistics.median([one.seconds - one.compute_s for one in read if one] or [0.0]))


def readable(found: Mapping[str, Sequence[One | None]]) -> list[int]:
    """The indices of the texts that all levels can take."""
    return [index for index, of_all in enumerate(zip(*found.values(), strict=True)) if all(of_all)]
