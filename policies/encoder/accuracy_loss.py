"""How much accuracy is lost by answering early, and how sure that is, from the texts that it is chosen on.

Those texts flatter what is chosen on them, as of many choices one got lucky. So a promise must be kept by a margin of
standard errors.
"""

from __future__ import annotations

from math import sqrt

MARGIN = 1.65
"""Standard errors by which a promise must be kept."""


def loss_error(lost: float, differing: float, texts: int) -> float:
    """The standard error of a loss, where `differing` of the texts are lost or won, and `lost` more lost than won."""
    share, loss = (differing + 2) / (texts + 2), lost / (texts + 2)
    return sqrt((share - loss**2) / texts)
