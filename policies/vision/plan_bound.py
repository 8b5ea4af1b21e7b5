"""The most that batches can still gain after a given moment: an upper bound for the search in `pareto_plan`.

In every plan, the batches up to the k-th that run take no more time together than there is until the k-th is due. Let
a second before the k-th is due cost a price mu_k (a Lagrangian bound), so that a batch pays Lambda_j, the sum of mu_k
from its own k = j on, for each second that it takes. Then batches j > b that begin at t gain no more than

    sum over j of max(0, max over options of gain - Lambda_j * seconds)  +  sum over k > b of mu_k * max(0, due_k - t)

whatever the prices. The best are those at which batches could be run in part: take what gains most per second first,
as long as there is time before it is due; what then does not fit tells the price of the time before. The bound holds at
any multiple of them too, and the least of several counts, as prices that suit the plan as a whole do not suit each end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.policies.vision.token_profile import Floats

_SCALES = np.array([0.0, 0.8, 0.9, 1.0, 1.1, 1.3])
"""Multiples of the prices that are tried."""


class Option(NamedTuple):
    """What may become of one batch, in rising seconds and rising gains; the first is not to run it."""

    choice: NDArray[np.intp]
    """The index of a gamma; -1 for none."""
    seconds: Floats
    gain: Floats


def slopes(seconds: Sequence[float], gain: Sequence[float]) -> list[tuple[float, float]]:
    """The concave hull over points in rising seconds: (gain per second, seconds) of each edge that rises, in order.

    So the steepest comes first. It begins at the first point, which is before all others; these may take equally long.
    """
    corners = [(seconds[0], gain[0])]
    for second, most in zip(seconds[1:], gain[1:], strict=True):
        if most <= corners[-1][1]:
            continue
        while len(corners) > 1 and not _bends(corners[-2], corners[-1], (second, most)):
            corners.pop()
        corners.append((second, most))
    return [(_slope(a, b), b[0] - a[0]) for a, b in pairwise(corners)]


def _bends(left: tuple[float, float], corner: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether the way from left to right, both upwards, is less steep behind the corner."""
    return corner[0] < right[0] and _slope(left, corner) > _slope(corner, right)


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


class PlanBound:
    """The bound for batches with such options, in the order in which they are `due`."""

    def __init__(self, now: float, options: Sequence[Option], due: Sequence[float]) -> None:
        prices = _prices(now, options, due)
        own = np.zeros((len(options) + 1, len(_SCALES)))
        for batch, (option, cost) in enumerate(zip(options, prices[:, None, None] * _SCALES[:, None], strict=True)):
            own[batch] = (option.gain - cost * option.seconds).max(axis=1)
        self._own: Floats = own[::-1].cumsum(axis=0)[::-1, :, None]
        self._worth = _worth(now, prices, due)

    def after(self, batch: int, start: Floats) -> Floats:
        """The most that the batches behind `batch` gain if the first of them begins at `start`; never rises with it."""
        moments, worth = self._worth[batch]
        most: Floats = (self._own[batch + 1] + _SCALES[:, None] * np.interp(start, moments, worth)).min(axis=0)
        return most


def _worth(now: float, prices: Floats, due: Sequence[float]) -> list[tuple[Floats, Floats]]:
    """For each batch, of those behind it the second sum of the bound, at moments between which it is linear."""
    mu = prices - np.append(prices[1:], 0)
    falls = np.flatnonzero(mu > 0)
    mu, times = mu[falls], np.maximum(np.array(due)[falls], now)
    tables = []
    for first in range(len(falls) + 1):
        moments = np.concatenate(([now], times[first:]))
        tables.append((moments, np.maximum(times[first:] - moments[:, None], 0) @ mu[first:]))
    return [tables[first] for first in np.searchsorted(falls, np.arange(len(prices)), side="right").tolist()]


def _prices(now: float, options: Sequence[Option], due: Sequence[float]) -> Floats:
    """Of a second of each batch (Lambda), falling: what the best of what does not fit would have gained in it."""
    edges = sorted(
        (
            (rate, seconds, batch)
            for batch, option in enumerate(options)
            for rate, seconds in slopes(option.seconds.tolist(), option.gain.tolist())
        ),
        reverse=True,
    )
    room = np.maximum(np.array(due) - now, 0)
    prices = np.zeros(len(options))
    full = 0
    for rate, seconds, batch in edges:
        if batch < full:
            continue
        left = room[batch:]
        fits = left.min()
        if seconds < fits:
            left -= seconds
            continue
        left -= fits
        end = batch + int(np.flatnonzero(left <= 0)[-1]) + 1
        prices[full:end] = rate
        full = end
        if full == len(prices):
            break
    return prices
