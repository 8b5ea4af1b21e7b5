"""How sure a classifier is of an answer: what its logits say of the classes, and of the likeliest one (Tabi §4.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def softmax(logits: ArrayLike, temperature: float = 1.0) -> Floats:
    """Probabilities of the classes, the last axis, from logits of any shape (equations 2 and 3)."""
    if not temperature > 0:
        raise ValueError(f"a temperature must be above 0, got {temperature}")
    scaled = np.asarray(logits, np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


def confidence(probabilities: ArrayLike) -> Floats:
    """con(y) of equation 3: the probability of the likeliest class, the last axis."""
    most: Floats = np.asarray(probabilities, np.float64).max(axis=-1)
    return most
