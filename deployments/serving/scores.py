"""What turns a classifier's logits into scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]


def apply(function: str, logits: FloatArray) -> FloatArray:
    """`logits` through softmax or sigmoid, or as they are."""
    scores: FloatArray = logits
    if function == "sigmoid":
        scores = (1 + np.tanh(logits / 2)) / 2
    elif function == "softmax":
        exponentials = np.exp(logits - logits.max())
        scores = exponentials / exponentials.sum()
    return scores


def likeliest(scores: FloatArray, top_k: int | None) -> NDArray[np.intp]:
    """The indices of the `top_k` highest scores, or of all, in falling order."""
    return np.argsort(-scores, kind="stable")[:top_k]
