"""Demand: how many requests of which length arrive, and whether that is still what the plan was made for (Arlo §3.3).

The gateways report what arrived by token length; reports are summed in ticks, and the ticks of a sliding window are
the demand that replicas are allocated for. Beyond the paper:

- Averages hide bursts: a quantile over the ticks may be asked for in place of the mean.
- The paper allocates periodically. Here a plan keeps a `Snapshot` of the demand it was made for, and `shifted` compares
  what has arrived since, so that a plan that has been overtaken need not wait for its period to end.

A shift is significant when it is both large and hardly chance. Chance is measured against what arrivals of this very
service do: the variance between blocks of ticks, which is greater than that of a Poisson process when they come in
bursts, scales the chi-square statistics (quasi-likelihood), and how few blocks it was estimated from widens their
distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

_ROUNDING = 1e-6
_SHARE_MOVED = 0.1
_RATE_CHANGED = 0.25
_LEAST_REQUESTS = 50
_LEAST_TICKS = 5
_LEAST_BLOCKS = 8
_DEVIATION = 3.72
"""In standard deviations of a normal distribution: chance goes beyond it once in 10,000 tests."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The demand that a plan is made for, by tick and bin."""

    lengths: tuple[int, ...]
    tick: int
    """The newest tick it contains."""
    counts: Counts


@dataclass(frozen=True)
class Shift:
    """A significant change of demand."""

    since: float
    """In seconds: what came before belongs to the old demand, and is best forgotten before planning anew."""
    reason: str


class LengthDemand:
    """What arrived in the last `window_s` seconds, by token length, in ticks of `tick_s` seconds.

    Requests of more than `longest` tokens count as `longest`. Bins are named by rising max_lengths: a request belongs
    to the shortest that is not below its length, or to the last. `now` is in seconds on any clock that does not run
    backwards. A tick counts once it is over; only while none is, the running one counts for a whole one. Observation
    begins with the first report. Raises ValueError for arguments out of range.
    """

    def __init__(self, longest: int, window_s: float = 120.0, tick_s: float = 1.0) -> None:
        if longest < 1 or not 0 < tick_s <= window_s:
            raise ValueError(
                f"longest must be positive and tick_s in (0, window_s], got {longest}, {tick_s} and {window_s}"
            )
        self._longest = longest
        self._tick_s = tick_s
        self._window = round(window_s / tick_s)
        self._rows: Counts = np.zeros((self._window + 1, longest + 1), np.int64)
        """The ring of ticks, with one row for the running tick."""
        self._first: int | None = None
        self._newest = 0

    def add(self, now: float, counts: Mapping[int, int] | NDArray[np.integer]) -> None:
        """Count a report: length in tokens -> requests since the reporter's last one, or an array indexed by length.

        A late report goes to the newest tick.
        """
        if isinstance(counts, Mapping):
            lengths = np.fromiter(counts.keys(), np.int64, len(counts))
            requests = np.fromiter(counts.values(), np.int64, len(counts))
        else:
            lengths, requests = np.arange(len(counts)), np.asarray(counts, np.int64)
        if (lengths < 0).any() or (requests < 0).any():
            raise ValueError("lengths and counts must not be negative")
        if self._first is None:
            self._first = self._newest = math.ceil(now / self._tick_s - _ROUNDING) - 1
        self._advance(now)
        np.add.at(self._rows[self._newest % len(self._rows)], np.minimum(lengths, self._longest), requests)

    def forget(self, before: float) -> None:
        """Count nothing any more that was reported before that time, as if observation had begun there."""
        if self._first is not None:
            self._first = min(self._newest, max(self._first, math.floor(before / self._tick_s + _ROUNDING)))

    def rates(self, now: float, lengths: Sequence[int], quantile: float | None = None) -> tuple[float, ...]:
        """Requests per second in each bin: the mean over the observed ticks, or that quantile (0 to 1) over them."""
        binned = self._binned(self._ticks(now), lengths)
        if not len(binned):
            return (0.0,) * len(lengths)
        per_tick = binned.mean(axis=0) if quantile is None else np.quantile(binned, quantile, axis=0)
        return tuple((per_tick / self._tick_s).tolist())

    def histogram(self, now: float) -> Counts:
        """Requests in the window by length, from 0 to `longest` tokens."""
        histogram: Counts = self._at(self._ticks(now)).sum(axis=0)
        return histogram

    def observed_s(self, now: float) -> float:
        """How much of the window has been observed, in seconds."""
        return self._tick_s * len(self._ticks(now))

    def snapshot(self, now: float, lengths: Sequence[int], newest_s: float = 0.0) -> Snapshot:
        """The demand as it is now, for `shifted` to compare with what comes.

        The newest `newest_s` seconds are left to what comes: a shift that has just begun would else hide in both.
        """
        ticks = self._ticks(now)
        ticks = ticks[: max(0, len(ticks) - round(newest_s / self._tick_s))]
        return Snapshot(tuple(lengths), ticks.stop - 1, self._binned(ticks, lengths))

    def shifted(self, now: float, snapshot: Snapshot) -> Shift | None:
        """How demand since the snapshot differs significantly from the demand in it; None if it does not.

        Significant is a total variation of the bins' shares of at least 0.1, or a change of the total rate by at least
        25%, that chance would show once in 10,000 such comparisons; it takes 50 requests and 5 ticks of new demand.
        The last 5, 10, 20... ticks are compared, up to half of the snapshot's number.

        From a snapshot of less than 40 ticks one cannot know how demand varies over such a time, and bursts may pass
        for a shift.
        """
        ticks = self._ticks(now)
        before = snapshot.counts
        since = self._binned(range(max(ticks.start, snapshot.tick + 1), ticks.stop), snapshot.lengths)
        if not len(before) or not len(since):
            return None
        fresh = _onset(before, since)
        if fresh < _LEAST_TICKS:
            return None
        size = _LEAST_TICKS
        while size <= min(len(since), max(2 * _LEAST_TICKS, len(before) // 2)):
            reason = _difference(before, since[-size:], self._tick_s)
            if reason:
                return Shift(self._tick_s * (ticks.stop - fresh), reason)
            size *= 2
        return None

    def _advance(self, now: float) -> None:
        """Open the tick that `now` lies in. A tick begins just after its first moment and contains its last."""
        tick = math.ceil(now / self._tick_s - _ROUNDING) - 1
        for opened in range(max(self._newest + 1, tick - self._window), tick + 1):
            self._rows[opened % len(self._rows)] = 0
        self._newest = max(self._newest, tick)

    def _ticks(self, now: float) -> range:
        """The ticks of the window that are over, as far as they were observed; if there are none, the running one."""
        if self._first is None:
            return range(0)
        self._advance(now)
        stop = min(math.floor(now / self._tick_s + _ROUNDING), self._newest + 1)
        start = max(self._first, stop - self._window, self._newest - self._window)
        return range(start, stop) if start < stop else range(self._newest, self._newest + 1)

    def _at(self, ticks: range) -> Counts:
        return self._rows[np.asarray(ticks, np.int64) % len(self._rows)]

    def _binned(self, ticks: range, lengths: Sequence[int]) -> Counts:
        edges = np.asarray(lengths, np.int64)
        if not len(edges) or edges[0] < 1 or edges[-1] > self._longest or (np.diff(edges) <= 0).any():
            raise ValueError(f"lengths must rise from at least 1 to at most {self._longest}, got {list(lengths)}")
        binned: Counts = np.add.reduceat(self._at(ticks), np.concatenate(([0], edges[:-1] + 1)), axis=1)
        return binned


def _onset(before: Counts, since: Counts) -> int:
    """How many of the newest ticks most likely belong to another demand than `before`, if any do."""
    newest = since[::-1].cumsum(axis=0)
    usual = np.outer(np.arange(1, len(since) + 1), (before.sum(axis=0) + 0.5) / len(before))
    deviance = newest * np.log(np.maximum(newest, 1) / usual) - newest + usual
    return int(deviance.sum(axis=1).argmax()) + 1


def _difference(before: Counts, after: Counts, tick_s: float) -> str | None:
    """What differs significantly between two stretches of ticks, by bin; None if nothing does."""
    block = max(1, min(len(after), len(before) // _LEAST_BLOCKS))
    stretches = [_blocks(counts, block) for counts in (before, after)]
    freedom = sum(len(blocks) - 1 for blocks in stretches)
    totals = np.array([before.sum(), after.sum()], float)

    ticks = np.array([len(before), len(after)])
    expected = ticks * totals.sum() / ticks.sum()
    old, new = totals / ticks / tick_s
    if max(expected[1], totals[1]) >= _LEAST_REQUESTS and abs(new - old) >= _RATE_CHANGED * old:
        sums = [blocks.sum(axis=1) for blocks in stretches]
        varied = sum(_pearson(blocks, np.full(len(blocks), blocks.mean())) for blocks in sums)
        if _beyond_chance(_pearson(totals, expected), 1, varied / max(freedom, 1), freedom):
            return f"the rate changed from {old:.1f} to {new:.1f} requests/s"

    if totals.min() < _LEAST_REQUESTS:
        return None
    table = np.array([before.sum(axis=0), after.sum(axis=0)], float)
    moved = float(np.abs(table[0] / totals[0] - table[1] / totals[1]).sum() / 2)
    if moved >= _SHARE_MOVED:
        bins = int((table.sum(axis=0) > 0).sum()) - 1
        varied = sum(_pearson(blocks, _proportional(blocks)) for blocks in stretches)
        if _beyond_chance(_likelihood_ratio(table), bins, varied / max(freedom * bins, 1), freedom):
            return f"{100 * moved:.0f}% of the requests changed to other lengths"
    return None


def _blocks(counts: Counts, size: int) -> Counts:
    """The newest ticks in blocks of `size`, each block's counts by bin."""
    blocks: Counts = counts[len(counts) % size :].reshape(-1, size, counts.shape[1]).sum(axis=1)
    return blocks


def _proportional(table: NDArray[np.number]) -> NDArray[np.float64]:
    """What each cell would be if every row had the same shares."""
    proportional: NDArray[np.float64] = np.outer(table.sum(axis=1), table.sum(axis=0)) / max(1, table.sum())
    return proportional


def _pearson(observed: NDArray[np.number], expected: NDArray[np.float64]) -> float:
    possible = expected > 0
    return float((np.square(observed - expected)[possible] / expected[possible]).sum())


def _likelihood_ratio(table: NDArray[np.float64]) -> float:
    """The G statistic of a table: close to Pearson's, but sober where little is expected."""
    seen = table > 0
    return float(2 * (table[seen] * np.log(table[seen] / _proportional(table)[seen])).sum())


def _beyond_chance(statistic: float, degrees: int, dispersion: float, freedom: int) -> bool:
    """Whether a chi-square statistic of `degrees` is significant, given a dispersion estimated with `freedom`.

    Divided by the dispersion and degrees it follows an F distribution; Bartlett's formula turns that into chi-square,
    and Wilson and Hilferty's cube root gives the latter's quantile. Less than Poisson's dispersion, 1, is taken as 1.
    """
    if not freedom:
        return False
    scaled = statistic / max(1.0, dispersion)
    chi_square = (freedom + degrees / 2 - 1) * math.log1p(scaled / freedom)
    spread = 2 / (9 * degrees)
    return bool(chi_square > degrees * (1 - spread + _DEVIATION * math.sqrt(spread)) ** 3)
