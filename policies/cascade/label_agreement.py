"""Whether the models of a cascade mean the same by their classes, which a vote (Tabi §4.3, equation 6) relies on.

Models of the same task may list their labels in different orders, or call them LABEL_0, LABEL_1 and so on in an order
of their own. The first is mended by name. The second shows when classes are renamed: how, is learned on one half of the
texts, and whether the models then agree more often, is counted on the other, where chance helps no renaming.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

from pliant.policies.cascade.calibration import Integers

SURE = 3.0
"""Standard errors by which renamed classes must agree more often, before labels count as mixed up."""
SHOWN = 5


class LabelOrderError(ValueError):
    """Two models' classes do not mean the same."""


def columns(reference: Sequence[str], labels: Sequence[str]) -> tuple[int, ...]:
    """Which columns of a model's logits, with `labels`, put them in the order of `reference`.

    Raises LabelOrderError when they are not the same labels, or one comes twice.
    """
    if len(set(labels)) != len(labels) or len(set(reference)) != len(reference):
        raise LabelOrderError(f"labels must differ, got {list(labels)} and {list(reference)}")
    if set(labels) != set(reference):
        raise LabelOrderError(
            f"the levels of a cascade need the same labels: only the one has {sorted(set(labels) - set(reference))[:5]}"
            f", only the other {sorted(set(reference) - set(labels))[:5]}"
        )
    place = {label: column for column, label in enumerate(labels)}
    return tuple(place[label] for label in reference)


def check_agreement(small: ArrayLike, large: ArrayLike) -> float:
    """The share of texts on which two models agree, from what they say of them, [n, classes] each.

    Raises LabelOrderError when they would agree on significantly more if some of the small one's classes were renamed.
    A weak model that takes one class for another is no such case, though a renaming would help it too: then either of
    the two still goes mostly by its own name (`_renaming`). Two labels swapped of ten show in a hundred texts, two of
    150 in several thousand.
    """
    first, second = np.asarray(small, np.float64), np.asarray(large, np.float64)
    if first.ndim != 2 or first.shape != second.shape or not len(first):
        raise ValueError(f"needs two tables [n, classes] of the same texts, got {first.shape} and {second.shape}")
    texts, classes = first.shape
    mine, theirs = first.argmax(axis=1), second.argmax(axis=1)
    order = np.random.default_rng(0).permutation(texts)
    halves = order[::2], order[1::2]
    renamed = np.empty_like(mine)
    for learned, counted in (halves, halves[::-1]):
        renamed[counted] = _renaming(mine[learned], theirs[learned], classes)[mine[counted]]
    agreed, would = mine == theirs, renamed == theirs
    won, lost = int((would & ~agreed).sum()), int((agreed & ~would).sum())
    if won - lost > SURE * sqrt(won + lost):
        names = _renaming(mine, theirs, classes)
        moved = [f"{name} to {names[name]}" for name in np.flatnonzero(names != np.arange(classes))[:SHOWN]]
        raise LabelOrderError(
            f"two levels agree on {agreed.mean():.1%} of {texts} texts, and would on {would.mean():.1%} if classes "
            f"were renamed ({', '.join(moved)}): their labels seem to be in different orders; name them alike in each "
            "model's id2label"
        )
    return float(agreed.mean())


def _renaming(mine: Integers, theirs: Integers, classes: int) -> Integers:
    """What to call each class of `mine`, [classes], from the answers [n] of both models.

    It is renamed to what the other model mostly says then, if no class is said more often there, what the other calls
    by the old name is mostly something else here, and the new name is not mostly right for those who have it now.
    """
    own = np.arange(classes)
    together = np.bincount(mine * classes + theirs, minlength=classes**2).reshape(classes, classes)
    same, most, mostly, by = together.diagonal(), together.max(axis=1), together.argmax(axis=1), together.max(axis=0)
    free, gone = (same < most) | (most == 0), (same < by) | (by == 0)
    named: Integers = np.where((same < most) & (most == by[mostly]) & gone & free[mostly], mostly, own)
    return named
