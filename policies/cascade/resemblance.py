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
"""Labelled texts of one degree: neighbours that all have fewer are taken together."""
RARE = 0.01
"""The share of live texts from which on there must be as many labelled ones."""


def degree(sure: float) -> int:
    """The degree of a calibrated confidence, from 0 to len(EDGES)."""
    return bisect_right(EDGES, sure)


def alike(sure: ArrayLike, live: Mapping[int, int]) -> Integers:
    """As many of the labelled texts as can be had for each degree to have the same share of them as of live texts.

    The first level is so `sure` [n] of the labelled ones, which are in an order that says nothing of them; `live` is
    the number of live texts by degree. Returns indices, rising: few where a degree is common among live texts and rare
    among labelled ones, whatever there is of others.
    """
    degrees = np.searchsorted(EDGES, np.asarray(sure), side="right")
    labelled = np.bincount(degrees, minlength=len(EDGES) + 1)
    group = _groups(labelled)
    of_live = np.bincount(group, [live.get(each, 0) for each in range(len(labelled))])
    of_labelled = np.bincount(group, labelled)
    total = of_live.sum()
    if not total:
        return np.arange(len(degrees))
    common = of_live >= RARE * total
    whole = (of_labelled[common] / of_live[common]).min()
    taken = np.floor(of_live * whole + 1e-9).astype(int)
    groups = group[degrees]
    return np.sort(np.concatenate([np.flatnonzero(groups == each)[:count] for each, count in enumerate(taken)]))


def _groups(labelled: Integers) -> Integers:
    """For each degree the group that it belongs to, rising from 0."""
    few = labelled < LEAST
    begins = np.append(True, ~(few[1:] & few[:-1]))
    groups: Integers = np.cumsum(begins) - 1
    return groups
