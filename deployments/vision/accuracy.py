"""How often a task is right under each gamma (OTAS §III-A, the task profiler).

It is measured on images that training has not seen, or else assumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pliant.cache import cache_folder, made, made_once
from pliant.formats.vision_task import TaskInfo, read_profiling

Run = Callable[[NDArray[np.uint8], int], Sequence[NDArray[np.float32]]]

_FILE = "accuracies.json"
_MERGED_AWAY = 0.5
"""The accuracy that is assumed lost where all tokens are merged: more than it is, so that merging is for need only."""


def measured(task: TaskInfo, gammas: Sequence[int], run: Run, most_rows: int, identity: str) -> Mapping[int, float]:
    """The share of the task's profiling images that it gets right, by gamma.

    `run(images, gamma)` gives logits for up to `most_rows` images. What was measured is kept in the user's cache for
    the same task, gammas and `identity` of the device; several processes measure it once. Raises TaskError.
    """

    def measure(folder: Path) -> None:
        images, labels = read_profiling(task)
        found = {str(gamma): _accuracy(images, labels, gamma, run, most_rows) for gamma in gammas}
        (folder / _FILE).write_text(json.dumps(found))

    return _read(made_once(_folder(task, gammas, identity), measure))


def kept(task: TaskInfo, gammas: Sequence[int], identity: str) -> Mapping[int, float] | None:
    """What `measured` found earlier, if it did."""
    folder = _folder(task, gammas, identity)
    return _read(folder) if made(folder) else None


def assumed_accuracies(tokens: Mapping[int, Sequence[int]]) -> Mapping[int, float]:
    """By gamma, relative to gamma 0: of the model's own head, and of tasks that say nothing of merged tokens.

    `tokens` has the tokens in each layer by gamma <= 0. Merging needs no parameters, so that a task that nobody has
    measured it with can be merged as well, and does not keep others in its batch from it. The accuracy is taken to fall
    with the share of tokens that are merged away. An operator who knows better gives a task its accuracies, or images
    to measure them by; the model's own head, too, can be given as a task.
    """
    plain = sum(tokens[0])
    return {gamma: 1 - _MERGED_AWAY * (1 - sum(counts) / plain) for gamma, counts in tokens.items()}


def _folder(task: TaskInfo, gammas: Sequence[int], identity: str) -> Path:
    name = hashlib.sha256(json.dumps([task.revision, sorted(gammas), identity]).encode()).hexdigest()[:16]
    return cache_folder() / "accuracies" / f"{task.name}-{name}"


def _read(folder: Path) -> Mapping[int, float]:
    found = json.loads((folder / _FILE).read_text())
    return {int(gamma): accuracy for gamma, accuracy in found.items()}


def _accuracy(images: NDArray[np.uint8], labels: NDArray[np.int64], gamma: int, run: Run, most_rows: int) -> float:
    right = 0
    for start in range(0, len(images), most_rows):
        rows = slice(start, start + most_rows)
        predicted = [logits.argmax() for logits in run(images[rows], gamma)]
        right += int((np.array(predicted) == labels[rows]).sum())
    return right / len(images)
