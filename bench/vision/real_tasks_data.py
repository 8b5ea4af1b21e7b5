"""Three public sets of images, cut into parts for learning, profiling and judging: CIFAR-10, EuroSAT, Fashion-MNIST.

The folder holds cifar10, eurosat and fashion_mnist as the benchmark's README lists them. Every image becomes 32 x 32
RGB. No image is in two parts.
"""

from __future__ import annotations

import io
import lzma
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pliant.errors import PliantError
from pliant.training.vision import Examples

SIDE = 32
_SEED = 0
_SHARES = (0.6, 0.8)
"""Where in all images those for training end, and where those for profiling."""


class Parts(NamedTuple):
    """The images of one task, none of them in two parts."""

    training: Examples
    profiling: Examples
    """A fifth, as in OTAS §V: the service measures accuracies on them."""
    held_out: Examples
    """Seen by nothing before the benchmark."""


@dataclass(frozen=True)
class RealTask:
    """A data set as a task."""

    name: str
    labels: tuple[str, ...]
    groups: tuple[int, ...]
    """By label: in which coarse group it is, all that the backbone learns of it. Tasks share no group."""
    read: Callable[[Path], Examples]
    """All its images, given the folder of the data sets."""

    def parts(self, data: Path) -> Parts:
        """Raises PliantError if it is not there."""
        try:
            every = self.read(data)
        except OSError as error:
            raise PliantError(
                f"{data} has no {self.name} that could be read ({error}); give --data its folder"
            ) from None
        return split(every)


def split(every: Examples) -> Parts:
    """Training, profiling and held-out images, drawn at random; always in the same way."""
    order = np.random.default_rng(_SEED).permutation(len(every.labels))
    ends = [round(len(order) * share) for share in _SHARES]
    return Parts(*(Examples(every.images[rows], every.labels[rows]) for rows in np.split(order, ends)))


def cifar10(data: Path) -> Examples:
    """12,000 photographs."""
    arrays = _arrays(data / "cifar10" / "cifar10_train10k_test2k.npz.xz")
    return Examples(_joined(arrays, "x"), _joined(arrays, "y").astype(np.int64))


def fashion_mnist(data: Path) -> Examples:
    """12,000 grey pictures of clothes, 28 x 28, with a black border added."""
    arrays = _arrays(data / "fashion_mnist" / "fashion_mnist_test10k_train2k.npz.xz")
    grey = _joined(arrays, "x")
    border = (SIDE - grey.shape[1]) // 2
    padded = np.pad(grey, ((0, 0), (border, border), (border, border)))
    return Examples(np.repeat(padded[..., None], 3, axis=3), _joined(arrays, "y").astype(np.int64))


def eurosat(data: Path) -> Examples:
    """2,000 satellite images, 64 x 64, made smaller."""
    labels = {label: index for index, label in enumerate(_EUROSAT)}
    images, indices = [], []
    with zipfile.ZipFile(data / "eurosat" / "eurosat_rgb_200_per_class_jpeg.zip") as archive:
        for name in sorted(archive.namelist()):
            with Image.open(io.BytesIO(archive.read(name))) as image:
                small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
            images.append(np.asarray(small))
            indices.append(labels[name.split("/")[-2]])
    return Examples(np.stack(images), np.array(indices, np.int64))


def _arrays(file: Path) -> dict[str, NDArray[np.uint8]]:
    with lzma.open(file) as packed, np.load(io.BytesIO(packed.read())) as arrays:
        return {name: arrays[name] for name in ("x_train", "x_test", "y_train", "y_test")}


def _joined(arrays: dict[str, NDArray[np.uint8]], which: str) -> NDArray[np.uint8]:
    return np.concatenate([arrays[f"{which}_train"], arrays[f"{which}_test"]])


def _numbered(first: int, groups: Sequence[Sequence[str]], labels: Sequence[str]) -> tuple[int, ...]:
    """The group of each label, from `first` on."""
    of_label = {label: first + index for index, group in enumerate(groups) for label in group}
    return tuple(of_label[label] for label in labels)


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_EUROSAT = (
    "AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial",
    "Pasture", "PermanentCrop", "Residential", "River", "SeaLake",
)  # fmt: skip
_GROUPS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("airplane", "ship"), ("automobile", "truck"), ("bird", "frog"), ("cat", "dog"), ("deer", "horse")),
    (
        ("Forest", "SeaLake"),
        ("AnnualCrop", "PermanentCrop"),
        ("HerbaceousVegetation", "Pasture"),
        ("Industrial", "Residential"),
        ("Highway", "River"),
    ),
    (("T-shirt", "dress"), ("trouser", "bag"), ("pullover", "coat", "shirt"), ("sandal", "sneaker", "ankle boot")),
)

TASKS = (
    RealTask("cifar10", _CIFAR10, _numbered(0, _GROUPS[0], _CIFAR10), cifar10),
    RealTask("eurosat", _EUROSAT, _numbered(5, _GROUPS[1], _EUROSAT), eurosat),
    RealTask("fashion_mnist", _FASHION, _numbered(10, _GROUPS[2], _FASHION), fashion_mnist),
)
GROUPS = tuple(" or ".join(group) for groups in _GROUPS for group in groups)
"""What the backbone tells apart: pairs, mostly, which the tasks then have to take apart."""
