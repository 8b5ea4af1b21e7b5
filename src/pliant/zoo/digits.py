"""The zoo's images: scikit-learn's handwritten digits, upscaled, and three tasks on them.

The 1,797 images of 8 x 8 pixels become 32 x 32, so that a transformer has tokens to spare. One part of them trains, one
profiles (OTAS §V sets a fifth aside for that), and one is seen by neither: benchmarks measure on that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from pliant.training.vision import Examples
from pliant.zoo.shapes import DIGITS_SIDE, GROUPS

_SEED = 0
_UNTIL = (0.6, 0.8)
"""Where in all images those for training end, and where those for profiling."""


@dataclass(frozen=True)
class DigitsTask:
    """A question about a digit: its answers, and which of them is right."""

    labels: tuple[str, ...]
    label: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Indices into `labels`, by digit."""
    slo_ms: float
    utility: float
    """Both as in the paper's table II."""


TASKS: Mapping[str, DigitsTask] = {
    "digit": DigitsTask(tuple(map(str, range(10))), lambda digits: digits, 600, 1.0),
    "parity": DigitsTask(("even", "odd"), lambda digits: digits % 2, 600, 0.3),
    "at-least-five": DigitsTask(("below five", "at least five"), lambda digits: digits // 5, 1000, 0.2),
}


def group(digits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices into `shapes.GROUPS`."""
    return digits % len(GROUPS)


def training() -> Examples:
    """What the model and the tasks learn from."""
    return _parts()[0]


def profiling() -> Examples:
    """What the tasks' accuracies are measured on: they come with the tasks."""
    return _parts()[1]


def held_out() -> Examples:
    """What has been used for nothing."""
    return _parts()[2]


@cache
def _parts() -> tuple[Examples, Examples, Examples]:
    found = load_digits()
    order = np.random.default_rng(_SEED).permutation(len(found.target))
    images = np.stack([_upscaled(found.images[index]) for index in order])
    digits = found.target[order].astype(np.int64)
    first, second = (round(len(order) * share) for share in _UNTIL)
    parts = (slice(first), slice(first, second), slice(second, None))
    learned, measured, unseen = (Examples(images[part], digits[part]) for part in parts)
    return learned, measured, unseen


def _upscaled(pixels: NDArray[np.float64]) -> NDArray[np.uint8]:
    """An image of 8 x 8 values from 0 to 16, as grey RGB."""
    small = Image.fromarray((pixels * (255 / 16)).round().astype(np.uint8))
    large = np.asarray(small.resize((DIGITS_SIDE, DIGITS_SIDE), Image.Resampling.BICUBIC))
    return np.repeat(large[:, :, None], 3, axis=2)
