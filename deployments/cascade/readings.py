"""What the levels of a cascade say of labelled texts, one text after the other (Tabi §5).

A level's latency is that of an idle service, whatever else its clients ask of it meanwhile: what its model takes of a
text of that length (`RisingLatency`), and the median over texts of everything else (tokenizing, the way there and
back), in which a queue would show. What only some texts meet, a wait or a busy machine, so moves neither mean nor tail,
and as levels read a few texts in turn, no level is read while the machine is slower than for the others. What a pruned
text takes follows from its length, too, so that texts read whole say of it as much as those read pruned.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from pliant.config.cascade import level_at
from pliant.deployments.cascade.pruning import Read, prune, read_words
from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.label_agreement import columns
from pliant.policies.cascade.latency import RisingLatency
from pliant.texts import Text

_WARM_UP = 3
"""Texts that a level reads before its latency counts."""
IN_A_ROW = 25
"""Texts that a level reads before the next one has its turn: its weights are then in the processor's caches, as when it
has the machine."""
HANDED, ONE_OF = 500, 5
"""Of so many texts that the quickest service reads, the others then read one of five, about as many as go on where a
cascade pays: so they were not at work just before."""

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
    """`compute_s` and what else a text of this level takes; of a pruned text with the time to prune it."""
    compute_s: float
    """What the model itself takes of a text of so many tokens."""
    words: Read | None
    """With their importance, if the level tells."""
    importance_s: float
    """What it takes to know them, beyond `seconds`: a text that is not pruned does without."""
    tokens: int
    """That the level has read."""


@dataclass(frozen=True)
class _Clock:
    """Tells what a level takes when it has nothing else to do, from how it has read whole texts."""

    read: Sequence[One]

    @cached_property
    def hop_s(self) -> float:
        """Of a text, beside the model."""
        return max(0.0, statistics.median(one.seconds - one.compute_s for one in self.read))

    def whole(self) -> list[One]:
        """The same texts, with the times of an idle level."""
        tells = RisingLatency([one.tokens for one in self.read], [one.importance_s for one in self.read])
        told_s = tells([one.tokens for one in self.read]).tolist()
        timed = zip(self._timed(self.read, 0.0), told_s, strict=True)
        return [one._replace(importance_s=importance_s) for one, importance_s in timed]

    def pruned(self, ones: Sequence[One], pruning_s: float) -> list[One]:
        """Others, which it has read too, and which it takes so long to prune."""
        return self._timed([*self.read, *ones], pruning_s)[len(self.read) :]

    def _timed(self, ones: Sequence[One], pruning_s: float) -> list[One]:
        tokens = [one.tokens for one in ones]
        takes = RisingLatency(tokens, [one.compute_s for one in ones])
        return [
            one._replace(seconds=compute_s + self.hop_s + pruning_s, compute_s=compute_s)
            for one, compute_s in zip(ones, takes(tokens).tolist(), strict=True)
        ]


class Readings:
    """Reads through `reader`, and says to `progress` how far it is."""

    def __init__(self, reader: Reader, levels: Sequence[Level], progress: Progress) -> None:
        self._reader = reader
        self._levels = levels
        self._columns = {level.name: list(columns(levels[0].labels, level.labels)) for level in levels}
        self._progress = progress
        self._clocks: dict[str, _Clock] = {}
        """By level."""

    async def whole(self, texts: Sequence[Text]) -> dict[str, list[One | None]]:
        """By level, what it says of each of `texts`; None where it cannot take the text."""
        services = self._services
        self._progress("levels read the labelled texts", 0.0)
        for service, levels in services.items():
            for text in texts[:_WARM_UP]:
                await self._read(service, text, levels)
        found: dict[str, list[One | None]] = {level.name: [] for level in self._levels}
        for start in range(0, len(texts), IN_A_ROW):
            self._progress("levels read the labelled texts", start / len(texts))
            for service, levels in services.items():
                for text in texts[start : start + IN_A_ROW]:
                    for level, one in zip(levels, await self._read(service, text, levels), strict=True):
                        found[level.name].append(one)
        return {name: self._timed(name, ones) for name, ones in found.items()}

    async def handed_s(self, texts: Sequence[Text]) -> dict[str, float]:
        """By level, how much longer a text takes there that comes from the quickest service, 0 for that: the median.

        The level's weights have left the processor's caches by then, and what waits for texts has gone to sleep.
        """
        some, services = texts[:HANDED], self._services
        longer: dict[str, list[float]] = {level.name: [] for level in self._levels}
        for start in range(0, len(some), IN_A_ROW) if len(services) > 1 else ():
            self._progress("texts go from level to level", start / len(some))
            row = some[start : start + IN_A_ROW]
            alone = {
                service: [await self._read(service, text, levels) for text in row]
                for service, levels in services.items()
            }
            first, *others = sorted(services, key=lambda service: _seconds(alone[service]))
            for place, text in enumerate(row):
                await self._read(first, text, services[first])
                for service in others if place % ONE_OF == ONE_OF - 1 else ():
                    handed = await self._read(service, text, services[service])
                    for level, one, before in zip(services[service], handed, alone[service][place], strict=True):
                        if one and before:
                            longer[level.name].append(one.seconds - before.seconds)
        return {name: max(0.0, statistics.median(of or [0.0])) for name, of in longer.items()}

    @cached_property
    def _services(self) -> dict[str, list[Level]]:
        """Of each, its levels."""
        found: dict[str, list[Level]] = {}
        for level in self._levels:
            found.setdefault(level_at(level.name).service, []).append(level)
        return found

    def _timed(self, level: str, found: Sequence[One | None]) -> list[One | None]:
        read = [one for one in found if one]
        if not read:
            return list(found)
        self._clocks[level] = clock = _Clock(read)
        timed = iter(clock.whole())
        return [one and next(timed) for one in found]

    async def pruned(self, level: str, pruner: str, alpha: float, given: Sequence[tuple[One, One]]) -> list[One]:
        """What `level` says of texts less the words that `pruner` gave too little attention; with the time to prune.

        `given` is each text as the pruner has read it, with importance, and as `level` has read it whole: that also
        goes for a text of which nothing is pruned, or whose rest it cannot take. What importance takes is not in it.
        """
        found, took = [], []
        reading = [Level(level, (), False)]
        for number, (pruner_reading, whole) in enumerate(given):
            self._progress(f"{level} reads texts pruned by {pruner}, alpha {alpha:g}", number / len(given))
            assert pruner_reading.words
            started = time.perf_counter()
            rest = prune(pruner_reading.words, alpha)
            took.append(time.perf_counter() - started)
            [one] = await self._read(level, rest.text, reading) if rest.pruned else [None]
            found.append(one or whole)
        return self._clocks[level].pruned(found, statistics.median(took))

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


def _seconds(read: Sequence[Sequence[One | None]]) -> float:
    """What texts took at the last level of a service."""
    return sum(one.seconds for *_, one in read if one)


def readable(found: Mapping[str, Sequence[One | None]]) -> list[int]:
    """The indices of the texts that all levels can take."""
    return [index for index, of_all in enumerate(zip(*found.values(), strict=True)) if all(of_all)]
