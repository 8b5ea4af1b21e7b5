"""Batching: which of a replica's waiting texts are computed together next, by what batches were measured to take.

A batch takes less time than its texts one after another, but longer than its first text alone, and padding makes short
texts pay for long ones. So the queue is cut, in rising length, into batches that follow one another, and the cut is
chosen for which all texts together wait least: a dynamic program over the measured times, exact among all such cuts.
Only the first batch is computed; then the queue, with what has arrived, is cut anew. A free replica never waits for
texts to come.

Long texts would then wait until no shorter ones are left. So a text is due after a quarter of the time to its deadline,
and when that cannot be met any more after half of it, all of it, twice that, and so on. One that would miss what it is
due by if it waited for one more batch goes at once, with as many others as make good use of the batch, unless another
one missed its deadline for that: then this goes, in a batch that ends by then.

Arlo runs batches of a fixed small size and leaves this for later work (§6).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, combinations, pairwise
from statistics import median
from typing import NamedTuple, Protocol, Self

from pliant.formats.pass_times import PassTimes

MOST_TEXTS = 32
"""Of a packed pass: more gain nothing, and make those that are done wait."""
_MOST_CUT = 32
"""Texts of the queue that are cut at once, the shortest ones."""
_MOST_SEEN = 128
"""Texts of the queue, from its front, that are looked at."""
_CUTS_REMEMBERED = 4096
_FAR = 16
"""Times the most tokens that were measured."""
_SOON = 0.25
"""Of the time from arrival to deadline, after which a text is due for the first time."""
_LAST_CHANCE, _SOON_DUE, _MISSED, _NOBODY = range(4)


class Waiting(NamedTuple):
    """A text in a replica's queue; times in seconds on any one clock."""

    length: int
    """In tokens."""
    arrived: float
    deadline: float
    """Infinite if none."""


class Batch(NamedTuple):
    """What to compute next."""

    texts: tuple[int, ...]
    """Places in the queue, in rising length."""
    seconds: float
    """That it is expected to take."""


class _Urgent(NamedTuple):
    rank: int
    due: float
    place: int


class BatchTimes(Protocol):
    """What batches were measured to take on one replica."""

    @property
    def most(self) -> int:
        """Texts that a batch may have."""

    def step(self, length: int) -> int:
        """The least length that takes as long as `length`, for which alone the queue need be cut."""

    def seconds(self, lengths: Sequence[int]) -> list[float]:
        """Of the batches of the first text, the first two, and so on, of texts in rising length, at most `most`."""


@dataclass(frozen=True)
class PaddedTimes:
    """Of runtimes for some batch sizes and lengths, which pad texts to a length and batches to a size.

    `table[i][j]` is the seconds of a batch of `sizes[i]` texts of `lengths[j]` tokens; both rise. Raises ValueError for
    anything else.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for rising in (self.sizes, self.lengths):
            if not rising or rising[0] < 1 or any(left >= right for left, right in pairwise(rising)):
                raise ValueError(f"sizes and lengths must be positive and rise, got {rising}")
        right_shape = [len(row) for row in self.table] == [len(self.lengths)] * len(self.sizes)
        if not right_shape or not all(0 < seconds < math.inf for row in self.table for seconds in row):
            raise ValueError("the table needs positive seconds for each size and length")

    @property
    def most(self) -> int:
        return self.sizes[-1]

    def step(self, length: int) -> int:
        return self.lengths[bisect_left(self.lengths, length)]

    def seconds(self, lengths: Sequence[int]) -> list[float]:
        columns = [bisect_left(self.lengths, length) for length in lengths]
        return [rows[column] for rows, column in zip(self._by_count, columns, strict=False)]

    @cached_property
    def _by_count(self) -> list[list[float]]:
        """The seconds by length of batches of one text, two and so on: the least that a size which holds them takes."""
        found = []
        for count in range(1, self.most + 1):
            fitting = self.table[bisect_left(self.sizes, count) :]
            longest_first = [min(column) for column in zip(*fitting, strict=True)][::-1]
            found.append(list(accumulate(longest_first, min))[::-1])
        return found


@dataclass(frozen=True)
class PackedTimes:
    """Of a runtime that takes texts one behind another, without padding: attention stays within each text.

    Seconds by total tokens, linear between `points` and beyond the last, and `square_s` more for each pair of tokens
    that attend to each other (the sum of the squares of the lengths). Raises ValueError unless tokens and seconds are
    positive, tokens rise, and there are two points at least.
    """

    points: tuple[tuple[int, float], ...]
    square_s: float
    most: int
    grain: int = 16
    """Lengths are rounded up to multiples of this when the queue is cut."""

    def __post_init__(self) -> None:
        rising = all(0 < left[0] < right[0] and 0 < left[1] <= right[1] for left, right in pairwise(self.points))
        if len(self.points) < 2 or not rising or self.square_s < 0 or self.most < 1 or self.grain < 1:
            raise ValueError(f"needs two points or more that rise, got {self.points}")

    @classmethod
    def fitted(cls, times: PassTimes, most: int = MOST_TEXTS) -> Self:
        """What the passes of a measured table took, as nearly as this can say; more tokens take in proportion."""
        cells = [(count * length, length, seconds) for (count, length), seconds in _possible(times).items()]
        slopes = [
            (longer[2] - shorter[2]) / (longer[0] * (longer[1] - shorter[1]))
            for shorter, longer in combinations(sorted(cells), 2)
            if shorter[0] == longer[0] and longer[1] > shorter[1]
        ]
        by_tokens = defaultdict(list)
        for tokens, length, seconds in cells:
            by_tokens[tokens].append((length, seconds))
        # Attention takes no more than half of any pass: the difference of two times is mostly noise where it is small.
        most_square_s = min(seconds / (2 * tokens * length) for tokens, length, seconds in cells)
        square_s = min(max(median(slopes or [0.0]), 0.0), most_square_s)
        linear = [
            median(seconds - square_s * tokens * length for length, seconds in found)
            for tokens, found in sorted(by_tokens.items())
        ]
        rising = list(accumulate(reversed(linear), min))[::-1]
        points = list(zip(sorted(by_tokens), rising, strict=True))
        last, seconds = points[-1]
        return cls((*points, (_FAR * last, _FAR * seconds)), square_s, most)

    def step(self, length: int) -> int:
        return -(-length // self.grain) * self.grain

    def seconds(self, lengths: Sequence[int]) -> list[float]:
        lengths = lengths[: self.most]
        tokens = accumulate(lengths)
        squares = accumulate(length * length for length in lengths)
        return [self._linear(total) + self.square_s * square for total, square in zip(tokens, squares, strict=True)]

    def _linear(self, tokens: int) -> float:
        place = min(max(bisect_left(self.points, (tokens, 0.0)), 1), len(self.points) - 1)
        (left, low), (right, high) = self.points[place - 1 : place + 1]
        return max(self.points[0][1], low + (high - low) * (tokens - left) / (right - left))


class Batcher:
    """Chooses a replica's next batch by what batches take; `longest` is the length of the longest text that fits."""

    def __init__(self, times: BatchTimes, longest: int) -> None:
        self._times = times
        self._cut = lru_cache(_CUTS_REMEMBERED)(partial(cut, times))
        self._alone_s = [times.seconds((times.step(length),))[0] for length in range(longest + 1)]
        steps = {times.step(length) for length in range(longest + 1)}
        shared = shares(times, steps)
        self._work_s = [alone * shared[times.step(length)] for length, alone in enumerate(self._alone_s)]
        self._longest_s = max(self._alone_s)

    def next_batch(self, now: float, waiting: Sequence[Waiting]) -> Batch:
        """Of the texts that wait, at least one, in order of arrival. Raises IndexError for one that is too long."""
        waiting = waiting[:_MOST_SEEN]
        if len(waiting) == 1:
            return Batch((0,), self._alone_s[waiting[0].length])
        step = self._times.step
        order = sorted(range(len(waiting)), key=lambda place: waiting[place].length)
        count, seconds = self._cut(tuple([step(waiting[place].length) for place in order[:_MOST_CUT]]))
        batch, urgent = Batch(tuple(order[:count]), seconds), _Urgent(_NOBODY, math.inf, 0)
        while (found := self._urgent(now, now + batch.seconds, waiting, batch.texts)) and found < urgent:
            urgent = found
            within_s = urgent.due - now if urgent.rank == _LAST_CHANCE else math.inf
            batch = self._batch_with(urgent.place, within_s, waiting, order)
        return batch

    def batch_with(self, first: int, waiting: Sequence[Waiting]) -> Batch:
        """The text at place `first`, with as many others as make good use of the batch, whatever is due."""
        order = sorted(range(len(waiting)), key=lambda place: waiting[place].length)
        return self._batch_with(first, math.inf, waiting, order)

    def _urgent(self, now: float, free: float, waiting: Sequence[Waiting], batch: Sequence[int]) -> _Urgent | None:
        """The text that is to go first of those that would be late; None if none is.

        Late is what is due before it is answered in `batch`, until `free`, or else behind it. Those whose deadline it
        is, and that can still meet it, come before those that are due soon, and last those that have missed it.
        """
        alone_s, latest = self._alone_s, free + self._longest_s
        first: _Urgent | None = None
        for place, (length, arrived, deadline) in enumerate(waiting):
            if arrived + _SOON * (deadline - arrived) >= latest:
                continue
            alone = alone_s[length]
            limit = free if place in batch else free + alone
            if now + alone <= deadline < limit:
                found = _Urgent(_LAST_CHANCE, deadline, place)
            else:
                due = _due(waiting[place], now + alone)
                found = _Urgent(_SOON_DUE if due <= deadline else _MISSED, due, place)
            if found.due < limit:
                first = min(first, found) if first else found
        return first

    def _batch_with(self, urgent: int, within_s: float, waiting: Sequence[Waiting], order: Sequence[int]) -> Batch:
        """The batch with most work per second that has the text at `urgent` and takes at most `within_s`.

        The work of a text is what it takes in its best batch, so that no short one is padded to a long one.
        """
        times = self._times
        at = order.index(urgent)
        best, rate = Batch((urgent,), self._alone_s[waiting[urgent].length]), 0.0
        for first in range(max(0, at - times.most + 1), at + 1):
            places = order[first : first + times.most]
            spans = times.seconds([times.step(waiting[place].length) for place in places])
            work_s = list(accumulate(self._work_s[waiting[place].length] for place in places))
            for count in range(at - first + 1, len(spans) + 1):
                if spans[count - 1] <= within_s and work_s[count - 1] > rate * spans[count - 1]:
                    best, rate = Batch(tuple(places[:count]), spans[count - 1]), work_s[count - 1] / spans[count - 1]
        return best


def _possible(times: PassTimes) -> dict[tuple[int, int], float]:
    """The seconds by texts and tokens of each, less what can only be noise, as on a busy machine.

    Fewer or shorter texts never take longer, nor do as many tokens of shorter texts, nor twice as many texts more than
    twice as long.
    """
    cells = {
        (count, length): seconds
        for count, row in zip(times.counts, times.seconds, strict=True)
        for length, seconds in zip(times.lengths, row, strict=True)
        if seconds
    }
    found: dict[tuple[int, int], float] = {}
    while found != cells:
        found = dict(cells)
        for (count, length), seconds in found.items():
            bounds = [found.get(larger, math.inf) for larger in ((2 * count, length), (count, 2 * length))]
            bounds += [found.get((count // 2, 2 * length), math.inf), 2 * found.get((count // 2, length), math.inf)]
            cells[count, length] = min(seconds, *bounds)
    return found


def shares(times: BatchTimes, lengths: Iterable[int]) -> dict[int, float]:
    """By length: the share of what a text takes alone by which it holds up those behind it (see `ServiceCurve`).

    That is what it adds to a batch of texts of this length, of the best size.
    """
    found = {}
    for length in lengths:
        alone_s, *together_s = times.seconds((length,) * times.most)
        found[length] = min(1.0, *(seconds / count / alone_s for count, seconds in enumerate(together_s, start=2)))
    return found


def cut(times: BatchTimes, lengths: tuple[int, ...]) -> tuple[int, float]:
    """How many texts of a queue in rising length make the first batch, and its seconds.

    Of all cuts into batches that follow one another, the one with the least sum of the times until each text is
    answered. O(texts * most).
    """
    number = len(lengths)
    waits, first = [0.0] * (number + 1), (0, 0.0)
    for start in range(number - 1, -1, -1):
        left = number - start
        least = math.inf
        for count, seconds in enumerate(times.seconds(lengths[start : start + times.most]), start=1):
            wait = seconds * left + waits[start + count]
            if wait < least:
                least, first = wait, (count, seconds)
        waits[start] = least
    return first


def _due(text: Waiting, earliest: float) -> float:
    """The first that can still be met: a quarter of the time to the deadline, half of it, all, twice that and so on."""
    due_s = _SOON * max(text.deadline - text.arrived, 1e-3)
    left_s = earliest - text.arrived
    return text.arrived + due_s * 2.0 ** max(0, math.ceil(math.log2(left_s / due_s))) if left_s > 0 else earliest
