"""How far tokens lie apart, as models with relative positions class it: MPNet and DeBERTa."""

import math

import numpy as np

from pliant.models.encoder_shape import Disentangled

_MPNET_REACH = 128


def distances(reach: int) -> np.ndarray:
    """int64 [2 * reach - 1]: how far the attended token lies behind the attending one, from 1 - reach on."""
    return np.arange(1 - reach, reach)


def mpnet_buckets(reach: int, buckets: int) -> np.ndarray:
    """The class of each of `distances(reach)`: half of them for either side, the nearest on their own."""
    behind = distances(reach)
    half = buckets // 2
    exact = half // 2
    far = abs(behind)
    scale = math.log(_MPNET_REACH / exact)
    beyond = np.log((far.clip(1) / exact).astype(np.float32)) / scale * (half - exact)
    shared = (exact + beyond.astype(np.int64)).clip(max=half - 1)
    found: np.ndarray = (behind > 0) * half + np.where(far < exact, far, shared)
    return found


def disentangled_buckets(reach: int, shape: Disentangled) -> np.ndarray:
    """The row of DeBERTa's embeddings of distances for each of `distances(reach)`."""
    ahead = -distances(reach)
    middle = shape.buckets // 2
    if shape.buckets < shape.reach:
        far = abs(ahead).clip(middle)
        ratio = np.log((far / middle).astype(np.float32)) / np.log(np.float32((shape.reach - 1) / middle))
        shared = (np.ceil(ratio * (middle - 1)) + middle) * np.sign(ahead)
        ahead = np.where(abs(ahead) <= middle, ahead, shared.astype(np.int64))
    return (ahead + shape.buckets).clip(0, 2 * shape.buckets - 1)
