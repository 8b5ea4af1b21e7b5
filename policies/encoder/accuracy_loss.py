"""How sure a loss of accuracy is: answers that come early, compared with the best model's on the same texts."""

from __future__ import annotations

from math import sqrt


def loss_error(lost: float, differing: float, texts: int) -> float:
    """The standard error of a loss, where `differing` of the texts are lost or won, and `lost` more lost than won."""
    share, loss = (differing + 2) / (texts + 2), lost / (texts + 2)
    return sqrt((share - loss**2) / texts)
