"""Images with labels, from which a task is trained: read from a folder, or from an .npz.

Every image becomes what the backbone takes in the way that the service does it: `Reader` is the gateway's.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pliant.errors import PliantError
from pliant.formats.vision_task import MOST_PROFILING
from pliant.models.adapter_files import shown
from pliant.training.vision import Examples

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
"""Of files that are read from folders."""
_PROFILED = 0.2
_FEWEST = 5
_CHANNELS = (1, 3)


class DataError(PliantError):
    """Images or labels that nothing can be trained on."""


class Reader(Protocol):
    """As `pliant.deployments.http.images.ImageReader`."""

    def decode(self, encoded: bytes) -> NDArray[np.uint8]: ...

    def fit(self, pixels: NDArray[Any]) -> NDArray[np.uint8]: ...


class Labelled(NamedTuple):
    """Images, and the names of their labels."""

    labels: tuple[str, ...]
    examples: Examples


def read_labelled(
    data: Path, labels: Sequence[str], reader: Reader, report: Callable[[float], object] = lambda _done: None
) -> Labelled:
    """What is in `data`: a folder with a folder of images for each label, or an .npz.

    That has `images` [n, height, width] or [n, height, width, channels], as bytes or as floats in [0, 1], and `labels`
    [n], which are numbers from 0 on or names. `labels` gives the order of the names, or names to numbers; without any
    names are in alphabetical order, and numbers their own names. Raises DataError, in one line.
    """
    try:
        if data.is_dir():
            return _read_folder(data, labels, reader, report)
        return _read_arrays(data, labels, reader, report)
    except OSError as error:
        raise DataError(f"{error.filename or data}: cannot be read: {error.strerror or error}") from None


def split(examples: Examples, seed: int) -> tuple[Examples, Examples]:
    """What to train on, and a fifth to measure accuracies by, drawn by `seed` (OTAS §V).

    That is about a fifth of the images of each label, and never all of them, nor more than a service takes. Some label
    must have two.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(examples.labels))
    labels = examples.labels[order]
    rank = np.empty(len(order))
    for label in np.unique(labels):
        (own,) = np.nonzero(labels == label)
        rank[own] = (np.arange(len(own)) + random.random()) / len(own)
        rank[own[-1]] = np.inf
    count = min(max(1, round(_PROFILED * len(order))), np.isfinite(rank).sum(), MOST_PROFILING)
    by_rank = np.argsort(rank)
    training, profiling = (
        Examples(examples.images[rows], examples.labels[rows])
        for rows in (order[np.sort(by_rank[count:])], order[by_rank[:count]])
    )
    return training, profiling


def _read_folder(data: Path, labels: Sequence[str], reader: Reader, report: Callable[[float], object]) -> Labelled:
    found = {folder.name: folder for folder in sorted(data.iterdir()) if folder.is_dir() and folder.name[0] != "."}
    names = _chosen(data, labels, tuple(found))
    files = [(file, index) for index, name in enumerate(names) for file in _images_in(found[name])]
    answers = np.array([index for _, index in files], np.int64)
    _check(data, names, answers)
    images = ((str(file), file.read_bytes()) for file, _ in files)
    return Labelled(names, Examples(_made(images, len(files), reader.decode, report), answers))


def _images_in(folder: Path) -> Iterator[Path]:
    """Files of known kinds, those in folders within it included."""
    return (file for file in sorted(folder.rglob("*")) if file.suffix.lower() in SUFFIXES and file.is_file())


def _read_arrays(data: Path, labels: Sequence[str], reader: Reader, report: Callable[[float], object]) -> Labelled:
    images, answers = _arrays(data)
    if answers.dtype.kind == "U":
        names = _chosen(data, labels, tuple(map(str, np.unique(answers))))
        kept = np.isin(answers, names)
        images, answers = images[kept], np.array([names.index(name) for name in answers[kept]], np.int64)
    else:
        names = tuple(labels) or tuple(map(str, range(int(answers.max()) + 1)))
        if answers.min() < 0 or answers.max() >= len(names):
            raise DataError(f"{data}: its labels go from {answers.min()} to {answers.max()}; {len(names)} have names")
    answers = answers.astype(np.int64)
    _check(data, names, answers)
    named = ((f"{data}: image {position}", image) for position, image in enumerate(images))
    return Labelled(names, Examples(_made(named, len(images), reader.fit, report), answers))


def _arrays(data: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images [n, height, width, channels], and numbers or names [n], with n > 0."""
    if data.exists() and not zipfile.is_zipfile(data):
        raise DataError(f"{data}: is no .npz; choose one, or a folder with a folder of images for each label")
    try:
        with np.load(data, allow_pickle=False) as held:
            images, answers = held["images"], held["labels"]
    except KeyError:
        raise DataError(f"{data}: has no images and labels; save it by numpy.savez(file, images=…, labels=…)") from None
    except OSError:
        raise
    except Exception as error:  # the reader raises whatever the broken file leads it to
        raise DataError(f"{data}: cannot be read: {shown(str(error))}") from None
    if images.ndim == 3:
        images = images[..., None]
    if (
        images.ndim != 4
        or images.shape[3] not in _CHANNELS
        or not (images.dtype == np.uint8 or images.dtype.kind == "f")
    ):
        raise DataError(
            f"{data}: its images are {images.dtype} {list(images.shape)}; they must be [n, height, width] or "
            "[n, height, width, 1 or 3], as bytes or as floats from 0 to 1"
        )
    if answers.shape != images.shape[:1] or not len(answers) or answers.dtype.kind not in "iuU":
        raise DataError(
            f"{data}: its labels are {answers.dtype} {list(answers.shape)}; they must be a number or a name for each "
            f"of {len(images)} images"
        )
    return images, answers


def _chosen(data: Path, labels: Sequence[str], found: tuple[str, ...]) -> tuple[str, ...]:
    if lacking := [label for label in labels if label not in found]:
        there = ", ".join(map(shown, found[:20])) or "none"
        raise DataError(f"{data}: has no images of {shown(lacking[0])}; there are labels: {there}")
    return tuple(labels) or found


def _made(
    images: Iterable[tuple[str, Any]],
    count: int,
    make: Callable[[Any], NDArray[np.uint8]],
    report: Callable[[float], object],
) -> NDArray[np.uint8]:
    """What the backbone takes, [n, height, width, channels], of `count` images and what to call them."""
    made: NDArray[np.uint8] | None = None
    for position, (name, image) in enumerate(images):
        report(position / count)
        try:
            pixels = make(image)
        except PliantError as error:
            raise DataError(f"{name}: {error}") from None
        if made is None:
            made = np.empty((count, *pixels.shape), np.uint8)
        made[position] = pixels
    assert made is not None
    return made


def _check(data: Path, names: Sequence[str], answers: NDArray[np.int64]) -> None:
    """Raise DataError if there is too little to learn from."""
    counts = np.bincount(answers, minlength=len(names))
    if len(names) < 2:
        raise DataError(f"{data}: has images of {shown(names[0]) if names else 'no label'}; at least 2 are needed")
    if not counts.all():
        raise DataError(f"{data}: has no images of {shown(names[int(counts.argmin())])}; add some, or leave it out")
    if counts.max() < 2:
        raise DataError(f"{data}: has one image of each label; some must have more, to measure accuracies by")
    if len(answers) < _FEWEST:
        raise DataError(f"{data}: has {len(answers)} images; at least {_FEWEST} are needed, of which one profiles")
