"""The best plan for queued batches, which run one after another: whether, and with which gamma (OTAS §III-D, eq. 1).

Algorithm 2 keeps one clock for a batch and gamma, and so may keep a rich prefix that blocks what comes later. Here
batches are gone through in the order of their deadlines (whatever can be run in time can be run in that order), and a
*label* is what a prefix comes to: when it ends, and what it gains. A label is dropped

- when another one ends no later and gains no less (*dominance*): whatever follows it can follow the other as well;
- when the most that it could come to (`plan_bound`) is less than what a plan has that is already known (*the floor*,
  from a narrow search that goes before).

So the plan is the best, as brute force would find it. In the worst case labels double with every batch, though. Where
more than WIDTH of them are left, some are dropped that could matter, and what that costs at most is kept account of:

- of those whose gains fall in the same cell of an even grid, all but the first to end (*epsilon-dominance*). The cells
  are so wide that they sum to at most LOSS / 2 of the floor over all batches;
- those whose bound is at most 1 + LOSS / 2 of the floor, and if more than a stated number are left even so, of those in
  the same cell of a coarser grid all but the one with the greatest bound.

*Proof* that the best plan gains no more than D + max(B, what is found), where D is the sum of the cells' widths and B
the greatest bound of a label that was dropped for its bound. Follow the best plan, batch by batch. As long as it was
not dropped for its bound, there is a label that ends no later than the plan's prefix, and gains no less than that less
the cells so far: true of the empty prefix; if true before a batch, this label can do what the plan does with the batch,
in time; dominance replaces it by one that is no worse, and the grid by one that ends no later and gains less by at most
a cell, which D counts. At the end that label is a plan itself, so that the best gains at most D more than the one that
is found. If it was dropped for its bound, then what the plan gains after its prefix could be gained after the label
too, as that ends no later: in all the plan gains no more than the label's bound, and D.

D is at most LOSS / 2 of what is found. So the loss is at most LOSS unless B is above 1 + LOSS / 2 of it; then the
search is repeated with up to MOST_LABELS, which is what bounds its time. A plan tells the loss that is proven of it.
Only problems made for that were seen to keep it above LOSS: gains in proportion to the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.policies.vision.one_clock_plan import algorithm_2
from pliant.policies.vision.plan_bound import Option, PlanBound
from pliant.policies.vision.token_profile import Floats

Ints = NDArray[np.intp]

LOSS = 0.001
"""Of its gain that a plan is short of the best at most where there are too many labels."""
WIDTH = 256
"""Labels per batch up to which the plan is the best."""
MOST_LABELS = 1 << 14
"""Kept at all, of all batches together."""
_BEAM = 32
"""Labels per batch of the search for a floor."""
_ROUNDING = 1e-9
_BELOW_ALL = np.full(1, -1.0)


class Plan(NamedTuple):
    choices: list[int | None]
    """For each batch the index of its gamma, None where it does not run."""
    gain: float
    loss: float
    """No plan gains more than (1 + loss) times as much; 0 if this is the best. Algorithm 2 never gains more at all."""


class _Labels(NamedTuple):
    """Prefixes in the order of their ends, and of their gains."""

    end: Floats
    gain: Floats
    bound: Floats
    """The most that a plan can gain that begins so."""
    parent: Ints
    """The label that it extends."""
    choice: Ints
    """The gamma of the last batch; -1 if that does not run."""

    def take(self, chosen: Ints | NDArray[np.bool_]) -> _Labels:
        end, gain, bound, parent, choice = self
        return _Labels(end[chosen], gain[chosen], bound[chosen], parent[chosen], choice[chosen])


def best_plan(now: float, latency_s: Floats, gain: Floats, due: Sequence[float]) -> Plan:
    """The plan of the greatest gain.

    `latency_s` and `gain` are [batch, gamma], the batches in the order in which they are `due`; a batch that runs ends
    by then. A gamma that a batch cannot have has an infinite latency; one that gains nothing is not used. Raises
    ValueError where shapes or the order are wrong.
    """
    if latency_s.shape != gain.shape or len(due) != len(gain) or any(after < before for before, after in pairwise(due)):
        raise ValueError(
            f"needs latencies and gains of each of {len(due)} batches in the order in which they are due, "
            f"got shapes {latency_s.shape} and {gain.shape}"
        )
    options = [_options(now, *batch) for batch in zip(latency_s, gain, due, strict=True)]
    search = _Search(now, options, due, PlanBound(now, options, due))
    best = search.beam()
    if best.loss:
        best = search.run(best, WIDTH)
    if best.loss > LOSS:
        best = search.run(best, MOST_LABELS // len(due))
    if not best.loss:
        return best
    written = _carried_out(now, latency_s, gain, due, algorithm_2(now, latency_s, gain, due))
    return best if best.gain >= written.gain else written._replace(loss=best.loss)


def _carried_out(
    now: float, latency_s: Floats, gain: Floats, due: Sequence[float], choices: Sequence[int | None]
) -> Plan:
    """What comes of a plan, without the batches that would be late."""
    carried_out: list[int | None] = []
    total = 0.0
    for batch, choice in enumerate(choices):
        if choice is None or now + latency_s[batch, choice] > due[batch]:
            carried_out.append(None)
            continue
        carried_out.append(choice)
        now += float(latency_s[batch, choice])
        total += float(gain[batch, choice])
    return Plan(carried_out, total, 0.0)


def _options(now: float, latency_s: Floats, gain: Floats, due: float) -> Option:
    """Not to run; and of a batch's gammas those that are in time, and no other is both as fast and as good as."""
    order = np.lexsort((-gain, latency_s))
    gains = np.concatenate(([0.0], gain[order]))
    rising = gains[1:] > np.maximum.accumulate(gains)[:-1]
    choice = order[rising & (now + latency_s[order] <= due)]
    first = np.zeros(1)
    return Option(
        np.concatenate(([-1], choice)),
        np.concatenate((first, latency_s[choice])),
        np.concatenate((first, gain[choice])),
    )


class _Search:
    """Goes through the batches of one problem."""

    def __init__(self, now: float, options: Sequence[Option], due: Sequence[float], bound: PlanBound) -> None:
        self._now = now
        self._options = options
        self._due = due
        self._bound = bound

    def beam(self) -> Plan:
        """A good plan: of each batch only those _BEAM labels are kept that could come to most, and the one that did."""
        labels, history, dropped = self._start(), [], 0.0
        for batch in range(len(self._due)):
            labels = self._extended(labels, batch, 0.0)
            if len(labels.end) > _BEAM:
                order = np.argpartition(-labels.bound, _BEAM)
                dropped = max(dropped, float(labels.bound[order[_BEAM]]))
                labels = labels.take(np.append(np.sort(order[:_BEAM]), len(order) - 1))
            history.append(labels)
        return _traced(history, Plan([None] * len(history), 0.0, 0.0), dropped)

    def run(self, known: Plan, width: int) -> Plan:
        """The best plan, or `known` if it finds no better one; keeps no more than `width` labels of a batch."""
        labels, history, dropped, cells = self._start(), [], 0.0, 0.0
        promising = (1 + LOSS / 2) * known.gain
        for batch in range(len(self._due)):
            labels = self._extended(labels, batch, known.gain)
            if len(labels.end) > WIDTH:
                labels, most = _without(labels, labels.bound > promising)
                dropped = max(dropped, most)
            if len(labels.end) > WIDTH:
                cell = LOSS / 2 * known.gain / len(self._due)
                labels = labels.take(_firsts(np.floor(labels.gain / cell)))
                cells += cell
            if len(labels.end) > width:
                labels, most = _without(labels, _spread(labels, width))
                dropped = max(dropped, most)
            history.append(labels)
        return _traced(history, known, dropped, cells)

    def _start(self) -> _Labels:
        """The empty prefix."""
        none = np.zeros(1)
        return _Labels(none + self._now, none, none, np.zeros(1, np.intp), np.zeros(1, np.intp))

    def _extended(self, labels: _Labels, batch: int, floor: float) -> _Labels:
        """The labels after one more batch, less those that are dominated or bound to stay below the floor."""
        choice, seconds, gains = self._options[batch]
        ends = labels.end[:, None] + seconds
        in_time = ends <= self._due[batch]
        in_time[:, 0] = True
        place = np.flatnonzero(in_time)
        end, gain = ends.ravel()[place], (labels.gain[:, None] + gains).ravel()[place]
        bound = gain + self._bound.after(batch, end)
        kept = np.flatnonzero(bound >= floor * (1 - _ROUNDING))
        kept = kept[np.lexsort((-gain[kept], end[kept]))]
        best = np.concatenate((_BELOW_ALL, np.maximum.accumulate(gain[kept])))
        kept = kept[best[1:] > best[:-1]]
        place = place[kept]
        return _Labels(end[kept], gain[kept], bound[kept], place // len(choice), choice[place % len(choice)])


def _without(labels: _Labels, kept: NDArray[np.bool_]) -> tuple[_Labels, float]:
    """Those that are kept, and the greatest bound of those that are not."""
    return labels.take(kept), float(labels.bound[~kept].max(initial=0.0))


def _firsts(cells: Floats) -> NDArray[np.bool_]:
    """Which are the first of their cell, of cells in order."""
    return np.concatenate(([True], cells[1:] != cells[:-1]))


def _spread(labels: _Labels, width: int) -> NDArray[np.bool_]:
    """In each of `width` cells of gains, the label that could come to most."""
    cells = np.floor((labels.gain - labels.gain[0]) / (labels.gain[-1] - labels.gain[0]) * (width - 1))
    order = np.lexsort((-labels.bound, cells))
    kept = np.zeros(len(order), np.bool_)
    kept[order[_firsts(cells[order])]] = True
    return kept


def _traced(history: Sequence[_Labels], known: Plan, dropped: float, cells: float = 0.0) -> Plan:
    """The plan behind the label that gains most in the end, or `known` if that gains as much; and its loss."""
    choices, gain = known.choices, known.gain
    if history and history[-1].gain.max(initial=0.0) > gain:
        label = int(np.argmax(history[-1].gain))
        gain = float(history[-1].gain[label])
        choices = []
        for labels in reversed(history):
            choice = int(labels.choice[label])
            choices.insert(0, choice if choice >= 0 else None)
            label = int(labels.parent[label])
    return Plan(choices, gain, (max(gain, dropped) + cells) / gain - 1 if gain else 0.0)
