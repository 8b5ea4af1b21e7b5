"""A task of a vision service: what its folder says of the head and the prompts that adapt a frozen backbone to it.

A folder holds (OTAS §III-A, "task register", and §IV, `TaskModel`):

- task.json: name, labels, slo_ms, utility, and `gammas`: accuracy on held-out images by number of tokens, as text;
- task.safetensors: head.weight [labels, hidden], head.bias [labels]; for each gamma > 0 with prompts
  prompts.<gamma> [layers, gamma, hidden]; and head.<gamma>.weight, head.<gamma>.bias for each gamma but 0 that has a
  head of its own (beyond the paper, whose head is that of gamma 0 alone);
- profiling.safetensors, if there are images to measure accuracies by: images [n, height, width, channels] as bytes, of
  the backbone's input size, and labels [n] as 64-bit integers.

Of the tensors only the header and a sample are read, so that registering is cheap; torch is not imported.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.errors import PliantError
from pliant.message import message
from pliant.models.adapter_files import TensorFile, opened_tensors, read_object, read_tensors, shown
from pliant.models.vision_info import VisionInfo

TASK, WEIGHTS, PROFILING = "task.json", "task.safetensors", "profiling.safetensors"
HEAD_WEIGHT, HEAD_BIAS = "head.weight", "head.bias"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_PROMPTS = re.compile(r"prompts\.([1-9][0-9]{0,3})", re.ASCII)
_HEAD = re.compile(r"head\.(-?[1-9][0-9]{0,3})\.(?:weight|bias)", re.ASCII)
_GAMMA = re.compile(r"0|-?[1-9][0-9]{0,3}", re.ASCII)
USUAL_PROMPTS = (2, 4, 8)
"""In each layer, by gamma: the paper's (OTAS §V)."""
MOST_PROMPTS = 512
MOST_PROFILING = 5_000
"""Images that a task may bring to measure accuracies by."""
"""In each layer."""
_OWN_HEAD = "own head"
_MOST_LABELS = 100_000
_LONGEST_LABEL = 200
_LARGEST = 1_000_000
_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I64": np.dtype("<i8")}
_BYTES = {name: dtype.itemsize for name, dtype in _DTYPES.items()}
Size = tuple[int, ...]


class TaskError(PliantError):
    """A task that cannot be served."""


@message
class TaskRef(NamedTuple):
    """A task as the gateway names it to a replica, which reads the tensors."""

    name: str
    folder: str
    revision: str
    labels: int
    """How many there are: rows of the head."""
    prompts: tuple[int, ...]
    """For which gammas there are prompts, ascending."""
    heads: tuple[int, ...] = ()
    """Which gammas but 0 have a head of their own, ascending."""

    @property
    def key(self) -> str:
        """Another one once the tensors are others, even if the name stays."""
        return f"{self.name}@{self.revision}"

    @property
    def is_own(self) -> bool:
        """Whether it is the model's own head (`own_task`)."""
        return self.revision == _OWN_HEAD


def own_task(model: str, labels: int) -> TaskRef:
    """The head of `model`, with so many outputs, as a task: without any other, its own labels are the answers."""
    return TaskRef("model", model, _OWN_HEAD, labels, ())


@dataclass(frozen=True)
class TaskInfo:
    """A task as its folder describes it."""

    folder: Path
    revision: str
    """Another one once the folder's content is another; copies have the same."""
    name: str
    labels: tuple[str, ...]
    """In the order of the head's outputs."""
    slo_ms: float
    """How soon an answer is wanted, unless the request says otherwise."""
    utility: float
    """What a right answer in time is worth, unless the request says otherwise."""
    accuracies: Mapping[int, float]
    """By gamma, ascending: on images that training has not seen; 0 and every gamma with prompts are among them."""
    prompts: tuple[int, ...]
    """For which gammas there are prompts, ascending."""
    heads: tuple[int, ...]
    """Which gammas but 0 have a head of their own, ascending."""
    profiling_images: int
    """How many images there are to measure accuracies by."""

    @property
    def ref(self) -> TaskRef:
        """How the gateway names it to a replica."""
        return TaskRef(self.name, str(self.folder), self.revision, len(self.labels), self.prompts, self.heads)


def bytes_of(task: TaskRef, backbone: VisionInfo) -> int:
    """What `task` takes in a replica's memory, in bytes: heads and prompts, as 32-bit numbers."""
    heads = (1 + len(task.heads)) * task.labels * (backbone.hidden + 1)
    return 4 * (heads + backbone.layers * sum(task.prompts) * backbone.hidden)


def prompts_name(gamma: int) -> str:
    """The name of the tensor with the prompts of `gamma`."""
    return f"prompts.{gamma}"


def head_names(gamma: int) -> tuple[str, str]:
    """The names of the tensors with the weight and the bias of the head of `gamma`."""
    return (f"head.{gamma}.weight", f"head.{gamma}.bias") if gamma else (HEAD_WEIGHT, HEAD_BIAS)


def head_gammas(names: Iterable[str]) -> tuple[int, ...]:
    """Which gammas but 0 have tensors of a head among `names`, ascending."""
    return tuple(sorted({int(match[1]) for name in names if (match := _HEAD.fullmatch(name))}))


def read_task(folder: Path, backbone: VisionInfo) -> TaskInfo:
    """The task in a folder, for a backbone of such sizes.

    Raises TaskError, in one line, for what does not fit the backbone or itself, or cannot be read.
    """
    try:
        folder = folder.resolve()
        _check_complete(folder)
        with _naming(folder / TASK) as file:
            task, raw = read_object(file)
        with _naming(folder / WEIGHTS) as file:
            weights = read_tensors(file, most_dimensions=3)
        labels = _labels(task.get("labels"))
        prompts, heads = _adaptations(weights.shapes, labels, backbone)
        images, identity = _profiling(folder, backbone)
        return TaskInfo(
            folder=folder,
            revision=hashlib.sha256(raw + weights.identity + identity).hexdigest()[:16],
            name=_name(task.get("name")),
            labels=labels,
            slo_ms=_positive("slo_ms", task.get("slo_ms")),
            utility=_positive("utility", task.get("utility")),
            accuracies=_accuracies(task.get("gammas"), prompts, backbone),
            prompts=prompts,
            heads=heads,
            profiling_images=images,
        )
    except (ValueError, OSError, RuntimeError) as error:
        reason = f"cannot be read ({error.strerror}); check the path" if isinstance(error, OSError) else error
        raise TaskError(f"task {_one_line(folder)}: {reason}") from None


def read_profiling(task: TaskInfo) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images [n, height, width, channels] and labels [n] to measure accuracies by.

    Raises TaskError if they cannot be read, change or become a link meanwhile, or have labels that the task has not.
    """
    try:
        with opened_tensors(task.folder / PROFILING, _BYTES, most_dimensions=4) as file:
            images, labels = _read(file, "images", "U8"), _read(file, "labels", "I64").astype(np.int64)
        if images.ndim != 4 or labels.shape != images.shape[:1] or len(labels) != task.profiling_images:
            raise ValueError(f"has {_size(images.shape)} images and {_size(labels.shape)} labels: they have changed")
        if labels.min() < 0 or labels.max() >= len(task.labels):
            raise ValueError(f"has labels from {labels.min()} to {labels.max()}, the task {len(task.labels)} of them")
    except (ValueError, OSError) as error:
        raise TaskError(f"task {_one_line(task.folder)}: its {PROFILING} {error}; train the task again") from None
    return images, labels


def check_description(name: str, labels: Sequence[str], slo_ms: float, utility: float) -> None:
    """Raise TaskError, in one line, if `read_task` would refuse a task because of these."""
    try:
        _name(name), _labels(list(labels)), _positive("slo_ms", slo_ms), _positive("utility", utility)
    except ValueError as error:
        raise TaskError(f"task {shown(name)}: {error}") from None


def write_description(
    folder: Path,
    name: str,
    labels: Sequence[str],
    slo_ms: float,
    utility: float,
    accuracies: Mapping[int, float],
) -> None:
    """Write a folder's task.json."""
    gammas = {str(gamma): accuracies[gamma] for gamma in sorted(accuracies)}
    task = {"name": name, "labels": list(labels), "slo_ms": slo_ms, "utility": utility, "gammas": gammas}
    (folder / TASK).write_text(json.dumps(task, indent=2) + "\n")


def _check_complete(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError("there is no such folder; choose one that `pliant train-prompts` wrote")
    for name in (TASK, WEIGHTS):
        if not (folder / name).exists():
            raise ValueError(f"has no {name}; choose a folder that `pliant train-prompts` wrote")


@contextmanager
def _naming(file: Path) -> Iterator[Path]:
    """Makes a ValueError say which file it is about."""
    try:
        yield file
    except ValueError as error:
        raise ValueError(f"its {file.name} {error}; train the task again") from None


def _name(given: Any) -> str:
    if not isinstance(given, str) or not NAME.fullmatch(given):
        raise ValueError(
            f"its name is {shown(given)}; it must be at most 64 letters, digits, dots, dashes and underscores, and "
            "begin with a letter or digit"
        )
    return given


def _labels(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not 2 <= len(given) <= _MOST_LABELS:
        raise ValueError(f"its labels are {shown(given)}; it must list from 2 to {_MOST_LABELS:,}")
    for label in given:
        if not isinstance(label, str) or not 0 < len(label) <= _LONGEST_LABEL or not label.isprintable():
            raise ValueError(
                f"one of its labels is {shown(label)}; each must be text of one line and at most {_LONGEST_LABEL} "
                "characters"
            )
    label, times = Counter(given).most_common(1)[0]
    if times > 1:
        raise ValueError(f"it has the label {shown(label)} {times} times; give every label a name of its own")
    return tuple(given)


def _positive(key: str, given: Any) -> float:
    if _is_number(given) and 0 < given <= _LARGEST:
        return float(given)
    raise ValueError(f"its {key} is {shown(given)}; it must be a number above 0 and at most {_LARGEST:,}")


def _accuracies(given: Any, prompts: Sequence[int], backbone: VisionInfo) -> dict[int, float]:
    if not isinstance(given, dict):
        raise ValueError(f"its gammas are {shown(given)}; it must give an accuracy by gamma, such as {{'0': 0.9}}")
    most = backbone.patches // 2
    found = {}
    for text, accuracy in given.items():
        if not _GAMMA.fullmatch(text):
            raise ValueError(f"one of its gammas is {shown(text)}; it must be a whole number of at most 4 digits")
        gamma = int(text)
        if gamma < -most:
            raise ValueError(f"it has an accuracy for gamma {gamma}; no layer of this model merges more than {most}")
        if gamma > 0 and gamma not in prompts:
            raise ValueError(f"it has an accuracy for gamma {gamma}, but no {prompts_name(gamma)} in its {WEIGHTS}")
        if not _is_number(accuracy) or not 0 <= accuracy <= 1:
            raise ValueError(f"its accuracy for gamma {gamma} is {shown(accuracy)}; it must be from 0 to 1")
        found[gamma] = float(accuracy)
    if lacking := sorted({0, *prompts} - found.keys()):
        raise ValueError(f"it has no accuracy for gamma {lacking[0]}; measure it on held-out images, or train again")
    return dict(sorted(found.items()))


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _adaptations(
    shapes: Mapping[str, Size], labels: Sequence[str], backbone: VisionInfo
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which gammas have prompts, and which but 0 a head of their own, all tensors being of the right size."""
    heads = head_gammas(shapes)
    wanted: dict[str, Size] = {}
    for gamma in (0, *heads):
        wanted |= zip(head_names(gamma), ((len(labels), backbone.hidden), (len(labels),)), strict=True)
    prompts = []
    for name in shapes.keys() - wanted.keys():
        match = _PROMPTS.fullmatch(name)
        if not match or int(match[1]) > MOST_PROMPTS:
            raise ValueError(
                f"its tensor {shown(name)} is unknown; only {HEAD_WEIGHT}, {HEAD_BIAS}, the same as head.GAMMA.weight "
                f"and head.GAMMA.bias, and prompts.GAMMA, from 1 to {MOST_PROMPTS}, are read"
            )
        prompts.append(int(match[1]))
        wanted[name] = (backbone.layers, prompts[-1], backbone.hidden)
    if nobodys := [gamma for gamma in heads if gamma > 0 and gamma not in prompts]:
        raise ValueError(f"it has a head for gamma {nobodys[0]}, but no {prompts_name(nobodys[0])}; train it again")
    for name, size in wanted.items():
        if name not in shapes:
            raise ValueError(f"it has no {name}; train the task again")
        if shapes[name] != size:
            raise ValueError(
                f"its {name} is {_size(shapes[name])}, where {len(labels)} labels on this model of {backbone.layers} "
                f"layers and {backbone.hidden} numbers a token need {_size(size)}; train it on this model"
            )
    return tuple(sorted(prompts)), heads


def _profiling(folder: Path, backbone: VisionInfo) -> tuple[int, bytes]:
    """How many images there are, and what tells them from others."""
    file = folder / PROFILING
    if not file.exists():
        return 0, b""
    with _naming(file):
        stored = read_tensors(file, _BYTES, most_dimensions=4)
        count = stored.shapes.get("labels", (0,))[0]
        image = (backbone.height, backbone.width, backbone.channels)
        if not count or stored.shapes != {"images": (count, *image), "labels": (count,)}:
            sizes = ", ".join(f"{shown(name)} of {_size(size)}" for name, size in sorted(stored.shapes.items()))
            raise ValueError(f"holds {sizes or 'nothing'} instead of images [n] of {_size(image)} and labels [n]")
        return count, stored.identity


def _read(file: TensorFile, name: str, dtype: str) -> NDArray[Any]:
    raw = file.read(name)
    stored = file.tensors[name]
    if stored.dtype != dtype:
        raise ValueError(f"stores {name} as {stored.dtype} instead of {dtype}")
    return np.frombuffer(raw, _DTYPES[dtype]).reshape(stored.shape)


def _size(size: Size) -> str:
    return " x ".join(map(str, size)) or "one number"


def _one_line(folder: Path) -> str:
    """Its name: clients are told of it, and where it lies is the server's own."""
    return folder.name if folder.name.isprintable() else shown(folder.name)
