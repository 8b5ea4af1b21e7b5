"""Which labelled texts are like those that come now (beyond Tabi §5).

Nobody knows the labels of live texts, but how sure the first level is of them. Where texts are taken such that it is as
often as sure of them, a cascade does on them what it does live, as far as what becomes of a text depends on how hard it
is, and not on what else makes it another one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from pliant.policies.cascade.calibration import Integers

EDGES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Calibrated confidences, between which lie the degrees of sureness that are told apart."""
LEAST = 20
"""Labelled texts of one degree: one that has fewer is taken together with the next."""


def degree(sure: float) -> int:
    """The degree of a calibrated confidence, from 0 to len(EDGES)."""
    return bisect_right(EDGES, sure)


def alike(sure: ArrayLike, live: Mapping[int, int]) -> Integers:
    """As many of the labelled texts as can be had for each degree to have the same share of them as of live texts.

    The first level is so `sure` [n] of the labelled ones, which are in an order that says nothing of them; `live` is
    the number of live texts by degree. Returns indices, rising. What is like the few labelled ones of a degree counts
    with those of the next, however many live texts that is.
    """
    degrees = np.searchsorted(EDGES, np.asarray(sure), side="right")
    labelled = np.bincount(degrees, minlength=len(EDGES) + 1)
    group = _groups(labelled)
    of_live = np.bincount(group, [live.get(each, 0) for each in range(len(labelled))])
    of_labelled = np.bincount(group, labelled)
    total = of_live.sum()
    if not total:
        return np.arange(len(degrees))
    met = of_live > 0
    whole = (of_labelled[met] / of_live[met]).min()
    taken = np.floor(of_live * whole + 1e-9).astype(int)
    groups = group[degrees]
    return np.sort(np.concatenate([np.flatnonzero(groups == each)[:count] for each, count in enumerate(taken)]))


def _groups(labelled: Integers) -> Integers:
    """For each degree the group that it belongs to, rising from 0; each has LEAST labelled texts if all have."""
    groups, group, size = [], 0, 0
    for number, left in zip(labelled.tolist(), np.cumsum(labelled[::-1])[::-1].tolist(), strict=True):
        if size >= LEAST and left >= LEAST:
            group, size = group + 1, 0
        groups.append(group)
        size += number
    return np.array(groups)
