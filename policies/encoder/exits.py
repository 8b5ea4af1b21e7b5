"""Where texts leave an encoder that has exits: one cut-off for all of them, as their confidences are calibrated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pliant.policies.encoder.accuracy_loss import loss_error

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

STEPS = 100
"""Cut-offs are multiples of one over that."""
MARGIN = 1.65
"""Standard errors by which a promise must be kept, as texts flatter what is chosen on them. One cut-off in 20 that is
just not accurate enough seems to be, and all higher ones must seem so, too."""


def stops(sure: Floats, cut_off: float) -> Integers:
    """The first exit that is sure enough of each text, [n]; as many as there are exits, if none is.

    `sure` are the calibrated confidences, [exits, n].
    """
    enough = np.vstack([sure > cut_off, np.ones((1, sure.shape[1]), bool)])
    first: Integers = enough.argmax(axis=0)
    return first


def choose_cut_off(sure: Floats, right: NDArray[np.bool_], model: NDArray[np.bool_], loss: float) -> float:
    """The lowest cut-off from which on all keep the accuracy within `loss` of a model's by a margin of `MARGIN`
    standard errors; 1 if none does.

    `sure` is [exits, n], `right`, [exits + 1, n], tells which answers are, those of all layers last, and `model`, [n],
    which of the model's are: the same, unless the layers have changed since.
    """
    texts = right.shape[1]
    chosen = 1.0
    for cut_off in (step / STEPS for step in reversed(range(STEPS))):
        early = right[stops(sure, cut_off), np.arange(texts)]
        lost, differing = int(model.sum()) - int(early.sum()), int((early != model).sum())
        if lost / texts + MARGIN * loss_error(lost, differing, texts) > loss:
            break
        chosen = cut_off
    return chosen
