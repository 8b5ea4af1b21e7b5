"""Which runtimes each replica holds under a memory budget, and which texts it is to have first (beyond Arlo §3.3).

Arlo's program gives each replica one runtime. Here it may hold a *configuration*: as many as its memory has room for.
What remains to be decided is who computes which texts. Texts in rising length, weighed by what they take, are laid out
along a line, and each replica gets the next piece of it: short texts stay off replicas that long ones fill. Of a piece
of several lengths, a replica holds the runtimes that waste least on padding; then as many more as fit, so that it can
take what spills over. The greatest load of a replica is made as small as it can be: for replicas that are alike that
minimises the sum of any convex latencies, so no model of queues is needed.

No plan, cut along the line or not, has a lower greatest load than the texts at their own lengths, spread evenly: the
*bound*. A plan that reaches it is proven optimal; of another it is known by how much it may miss. With more replicas
than lengths nearly every piece is of one or two lengths, so little memory suffices. With two or three replicas and room
for two runtimes, up to 1.7 times the least load was found (by brute force, four lengths).

Somebody must hold the longest, whether there are such texts or not: it goes beside a piece that leaves room for it, or
counts as if there were a few, whichever gives the lower load.

For a given limit on loads, cutting each piece as long as it goes needs the fewest replicas, since whoever is further
along the line never needs more. The least limit that the replicas suffice for is found by bisection.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

_ROUNDING = 1e-9
_FEW = 1e-8
"""Texts of the longest, as a share of all, that are taken to come where there are none."""
_CLOSE = 1e-4
"""How close the bisection comes to the least limit, as a share of it."""
_MOST_OPTIONS = 256
"""Ways to compute the same lengths that are compared, of those that differ in memory and work."""


@dataclass(frozen=True)
class ResidentRuntime:
    """A runtime as a replica may hold it. Raises ValueError for values that make no sense."""

    max_length: int
    service_s: float
    """That a text takes on it."""
    memory_mb: float = 0.0
    """That it takes beside the weights, which a replica has once."""

    def __post_init__(self) -> None:
        if self.max_length < 1 or not 0 < self.service_s < math.inf or not 0 <= self.memory_mb < math.inf:
            raise ValueError(f"max_length and service_s must be positive, memory_mb at least 0, got {self}")


class Configuration(NamedTuple):
    """What some replicas hold."""

    home: int
    """The length of the texts that they are to have first (see `dispatch`)."""
    lengths: tuple[int, ...]
    """The max_lengths of their runtimes, in rising order."""


@dataclass(frozen=True)
class Placement:
    """How many replicas have each configuration, in rising home, and what is predicted of that."""

    replicas: dict[Configuration, int]
    load: float
    """The greatest of a replica: seconds of work per second."""
    bound: float
    """No placement has a lower one."""

    @property
    def proven(self) -> bool:
        """Whether it is certain that no other placement has a lower greatest load."""
        return self.load <= self.bound * (1 + 2 * _ROUNDING)


def place(runtimes: Sequence[ResidentRuntime], demand: Sequence[float], replicas: int, memory_mb: float) -> Placement:
    """The configurations of `replicas` that have `memory_mb` each for runtimes; some of them hold the longest.

    `demand[i]` is the texts per second for which the i-th runtime is the shortest that they fit into; without any, all
    lengths are taken to need equal work. The same arguments always give the same placement. Raises ValueError for
    lengths that do not rise, demand or replicas that make no sense, or a runtime that memory_mb has no room for.
    """
    _check(runtimes, demand, replicas, memory_mb)
    total = sum(demand)
    texts = [float(count) for count in demand] if total else [1 / runtime.service_s for runtime in runtimes]
    line, pieces = min(_cuts(runtimes, texts, replicas, memory_mb), key=lambda cut: _greatest(cut[1]))
    bound = line.work / replicas
    pieces += pieces[-1:] * (replicas - len(pieces))
    lengths = [runtime.max_length for runtime in runtimes]
    counts: Counter[Configuration] = Counter()
    for piece, count in Counter(pieces).items():
        held = line.filled(piece)
        counts[Configuration(lengths[piece.home], tuple(lengths[index] for index in held))] += count
    return Placement(dict(sorted(counts.items())), _greatest(pieces) if total else 0.0, bound if total else 0.0)


def _cuts(
    runtimes: Sequence[ResidentRuntime], texts: Sequence[float], replicas: int, memory_mb: float
) -> Iterator[tuple[_Line, list[_Piece]]]:
    """Ways to divide `texts`, in each of which somebody can hold the longest."""
    longest = len(texts) - 1
    line = _Line(runtimes, [*texts[:-1], max(texts[-1], _FEW * sum(texts))], memory_mb)
    yield line, line.cut_evenly(replicas)
    if not texts[-1]:
        line = _Line(runtimes, texts, memory_mb)
        pieces = line.cut_evenly(replicas)
        if any(line.filled(piece)[-1] == longest for piece in pieces):
            yield line, pieces


class _Piece(NamedTuple):
    """What one replica computes; runtimes are numbered in rising length."""

    home: int
    held: tuple[int, ...]
    work: float


def _greatest(pieces: Sequence[_Piece]) -> float:
    return max(piece.work for piece in pieces)


class _Reach(NamedTuple):
    """How far a piece goes: all shorter texts, and `texts` of the length `last`."""

    last: int
    texts: float
    held: tuple[int, ...]
    work: float


class _Option(NamedTuple):
    """A way to compute some lengths: memory, seconds per second, and the runtimes."""

    memory: float
    work: float
    held: tuple[int, ...]


class _Line:
    """All texts in rising length, to be cut into pieces."""

    def __init__(self, runtimes: Sequence[ResidentRuntime], texts: Sequence[float], memory_mb: float) -> None:
        self._seconds = [runtime.service_s for runtime in runtimes]
        self._texts = texts
        self._memory = [runtime.memory_mb for runtime in runtimes]
        self._room = memory_mb * (1 + _ROUNDING)
        self._before: list[float] = [0.0, *accumulate(texts)]
        self._own: list[float] = [0.0, *accumulate(map(operator.mul, texts, self._seconds))]
        self._options: dict[tuple[int, int], list[_Option]] = {}

    @property
    def work(self) -> float:
        """Seconds per second that all texts need at their own lengths."""
        return self._own[-1]

    def cut_evenly(self, most: int) -> list[_Piece]:
        """At most so many pieces, of which the longest is as short as it can be."""
        low, high = self.work / most, self._before[-1] * max(self._seconds) * (1 + _ROUNDING)
        pieces = self.cut(low * (1 + _ROUNDING), most)
        if pieces is None:
            while high - low > _CLOSE * low:
                limit = (low + high) / 2
                low, high = (limit, high) if self.cut(limit, most) is None else (low, limit)
            pieces = self.cut(high, most)
        assert pieces
        return pieces

    def cut(self, limit: float, most: int) -> list[_Piece] | None:
        """Pieces of at most `limit` seconds per second, each as long as it goes; None if there are more than `most`."""
        pieces: list[_Piece] = []
        at, left = 0, self._texts[0]
        while True:
            if left * self._seconds[at] <= _ROUNDING * limit:
                at += 1
                if at == len(self._texts):
                    return pieces
                left = self._texts[at]
                continue
            whole = int(left * self._seconds[at] / limit + 2 * _ROUNDING)
            if len(pieces) + max(1, whole) > most:
                return None
            if whole:
                pieces += [_Piece(at, (at,), limit)] * whole
                left -= whole * limit / self._seconds[at]
                continue
            reach = self._furthest(at, left, limit)
            pieces.append(_Piece(self._middle(at, left, reach), reach.held, reach.work))
            left = (left if reach.last == at else self._texts[reach.last]) - reach.texts
            at = reach.last

    def filled(self, piece: _Piece) -> tuple[int, ...]:
        """The runtimes that the replica holds: those of its piece, the longest, and what else fits, nearest first."""
        held = set(piece.held)
        room = self._room - sum(self._memory[index] for index in held)
        longest = len(self._texts) - 1
        for index in sorted(range(longest + 1), key=lambda index: (index != longest, abs(index - piece.home), -index)):
            if index not in held and self._memory[index] <= room:
                held.add(index)
                room -= self._memory[index]
        return tuple(sorted(held))

    def _furthest(self, at: int, left: float, limit: float) -> _Reach:
        """The piece that starts with `left` texts of length `at` and goes furthest; they alone are below the limit."""
        best = _Reach(at, left, (at,), left * self._seconds[at])
        for last in range(at + 1, len(self._texts)):
            if left * self._seconds[at] + self._own[last] - self._own[at + 1] > limit:
                break
            option = self._cheapest(at, left, last)
            texts = min(self._texts[last], (limit - option.work) / self._seconds[last]) if option else 0.0
            if option and texts > 0:
                best = _Reach(last, texts, option.held, option.work + texts * self._seconds[last])
        return best

    def _cheapest(self, at: int, left: float, last: int) -> _Option | None:
        """How `left` texts of `at` and all from there up to `last` are computed by a replica that holds `last`."""
        found = []
        for first in range(at, last + 1):
            work = (left + self._before[min(first + 1, last)] - self._before[at + 1]) * self._seconds[first]
            if first == last:
                found.append(_Option(self._memory[last], work, (last,)))
                continue
            for option in self._ways(first + 1, last):
                memory = self._memory[first] + option.memory
                if memory <= self._room:
                    found.append(_Option(memory, work + option.work, (first, *option.held)))
        return min(found, key=lambda option: (option.work, option.memory), default=None)

    def _ways(self, first: int, last: int) -> list[_Option]:
        """How the texts from `first` up to `last` are computed if `last` is held: less work for more memory."""
        if (first, last) not in self._options:
            ways = [
                _Option(self._memory[last], (self._before[last] - self._before[first]) * self._seconds[last], (last,))
            ]
            for shortest in range(first, last):
                work = (self._before[shortest + 1] - self._before[first]) * self._seconds[shortest]
                for option in self._ways(shortest + 1, last):
                    memory = self._memory[shortest] + option.memory
                    if memory <= self._room:
                        ways.append(_Option(memory, work + option.work, (shortest, *option.held)))
            undominated: list[_Option] = []
            for option in sorted(ways):
                if not undominated or option.work < undominated[-1].work:
                    undominated.append(option)
            self._options[first, last] = undominated[:: len(undominated) // _MOST_OPTIONS + 1]
        return self._options[first, last]

    def _middle(self, at: int, left: float, reach: _Reach) -> int:
        """The length at which half of a piece's texts, by what they take at their own lengths, are shorter."""
        works = [texts * seconds for texts, seconds in zip(self._texts, self._seconds, strict=True)]
        works[at] = left * self._seconds[at]
        works[reach.last] = reach.texts * self._seconds[reach.last]
        sums = list(accumulate(works[at : reach.last + 1]))
        return at + bisect_left(sums, sums[-1] / 2)


def _check(runtimes: Sequence[ResidentRuntime], demand: Sequence[float], replicas: int, memory_mb: float) -> None:
    lengths = [runtime.max_length for runtime in runtimes]
    if not lengths or any(after <= before for before, after in pairwise(lengths)):
        raise ValueError(f"needs at least one runtime, in rising max_length, got {lengths}")
    if len(demand) != len(runtimes) or not all(0 <= texts < math.inf for texts in demand):
        raise ValueError(
            f"needs a finite demand of at least 0 for each of {len(runtimes)} runtimes, got {list(demand)}"
        )
    if replicas < 1:
        raise ValueError(f"needs at least one replica, got {replicas}")
    largest = max(runtimes, key=lambda runtime: runtime.memory_mb)
    if largest.memory_mb > memory_mb:
        raise ValueError(
            f"memory_mb must be at least {largest.memory_mb:g}, "
            f"what the runtime for {largest.max_length} tokens takes, got {memory_mb:g}"
        )
