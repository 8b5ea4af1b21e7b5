"""Heads and prompts of the tasks that share one vision transformer; they come and go at run time (OTAS §III-B, §IV)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pliant.formats.vision_task import WEIGHTS, TaskError, head_gammas, head_names, prompts_name
from pliant.kernels.upload import upload
from pliant.models.adapter_files import TensorFile, opened_tensors, shown
from pliant.models.vision_head import Head

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TaskWeights(NamedTuple):
    """What makes a backbone do a task: heads, and prompts for some gammas above 0."""

    heads: Mapping[int, Head]
    """By gamma; 0 is among them. In memory float32, whatever features are computed in: that costs next to nothing."""
    prompts: Mapping[int, Tensor]
    """By gamma: [layers, gamma, hidden]."""

    def head(self, gamma: int) -> Head:
        """That of the nearest gamma that is not on the other side of 0."""
        near = (own for own in self.heads if own * gamma >= 0)
        return self.heads[min(near, key=lambda own: (abs(own - gamma), abs(own)))]

    def to(self, device: torch.device, dtype: torch.dtype) -> "TaskWeights":
        """The same on `device`, with prompts as `dtype`."""
        heads = {
            gamma: Head(*(tensor.to(device, torch.float32) for tensor in head)) for gamma, head in self.heads.items()
        }
        return TaskWeights(heads, {gamma: tensor.to(device, dtype) for gamma, tensor in self.prompts.items()})


def read_weights(folder: Path) -> TaskWeights:
    """The tensors of a task's folder, on the CPU.

    Raises TaskError if they cannot be read, change or become a link meanwhile, or hold numbers that are not finite.
    """
    try:
        with opened_tensors(folder / WEIGHTS, most_dimensions=3) as file:
            weights = _weights(file)
        tensors = [*(tensor for head in weights.heads.values() for tensor in head), *weights.prompts.values()]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise ValueError("holds numbers that are not finite")
    except (OSError, ValueError) as error:
        raise TaskError(f"task {folder}: its {WEIGHTS} {error}; train the task again") from None
    return weights


def _weights(file: TensorFile) -> TaskWeights:
    names = {gamma: head_names(gamma) for gamma in (0, *head_gammas(file.tensors))}
    heads = {gamma: Head(_read(file, weight, 2), _read(file, bias, 1)) for gamma, (weight, bias) in names.items()}
    prompts = {}
    for name in file.tensors.keys() - {name for both in names.values() for name in both}:
        tensor = _read(file, name, 3)
        if name != prompts_name(gamma := tensor.shape[1]):
            raise ValueError(f"has {shown(name)} of {gamma} tokens a layer, which is neither prompts nor a head")
        prompts[gamma] = tensor
    return TaskWeights(heads, prompts)


def _read(file: TensorFile, name: str, dimensions: int) -> Tensor:
    raw = file.read(name)
    stored = file.tensors[name]
    if len(stored.shape) != dimensions or not raw:
        raise ValueError(f"has {shown(name)} as {list(stored.shape)}, which should have {dimensions} dimensions")
    return torch.frombuffer(raw, dtype=_DTYPES[stored.dtype]).view(stored.shape)


class TaskTable:
    """The tasks in memory, by key, for a backbone of so many `layers` and `hidden` numbers a token."""

    def __init__(self, layers: int, hidden: int) -> None:
        self._layers = layers
        self._hidden = hidden
        self._tasks: dict[str, TaskWeights] = {}

    def add(self, key: str, weights: TaskWeights) -> None:
        """Raises ValueError if `key` is there or sizes do not fit."""
        if key in self._tasks:
            raise ValueError(f"task {key} is there already; remove it first")
        labels = len(weights.heads[0].bias)
        sizes: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        for gamma, head in weights.heads.items():
            sizes |= zip(head_names(gamma), zip(head, ((labels, self._hidden), (labels,)), strict=True), strict=True)
        for gamma, prompts in weights.prompts.items():
            sizes[prompts_name(gamma)] = (prompts, (self._layers, gamma, self._hidden))
        for name, (tensor, size) in sizes.items():
            if tuple(tensor.shape) != size:
                raise ValueError(f"task {key}: its {name} is {list(tensor.shape)}; this model needs {list(size)}")
        self._tasks[key] = weights

    def remove(self, key: str) -> None:
        """Raises KeyError if it is not there."""
        del self._tasks[key]

    def check(self, keys: Sequence[str], gamma: int) -> None:
        """Raise ValueError, naming it, if a task is not there or has no prompts for `gamma`."""
        for key in set(keys):
            if key not in self._tasks:
                raise ValueError(f"task {key} is not in memory; add it first")
            if gamma > 0 and gamma not in (known := self._tasks[key].prompts):
                raise ValueError(f"task {key} has no prompts for gamma {gamma}, only for {sorted(known)}")

    def prompts(self, keys: Sequence[str], gamma: int) -> Tensor:
        """Each row's own, [n, layers, gamma, hidden]."""
        return torch.stack([self._tasks[key].prompts[gamma] for key in keys])

    def logits(self, features: Tensor, keys: Sequence[str], gamma: int) -> list[NDArray[np.float32]]:
        """What each row's own head makes of `features` [n, hidden] under `gamma`: float32 [labels]; one product for
        each task, and one copy from the device."""
        rows: dict[str, list[int]] = {}
        for row, key in enumerate(keys):
            rows.setdefault(key, []).append(row)
        features = features.float()
        found = [self._logits(self._tasks[key].head(gamma), features, own) for key, own in rows.items()]
        flat = torch.cat([logits.flatten() for logits in found]).cpu().numpy()
        parts = np.split(flat, np.cumsum([logits.numel() for logits in found])[:-1])
        answers = {
            row: each
            for own, part in zip(rows.values(), parts, strict=True)
            for row, each in zip(own, part.reshape(len(own), -1), strict=True)
        }
        return [answers[row] for row in range(len(keys))]

    @staticmethod
    def _logits(head: Head, features: Tensor, rows: list[int]) -> Tensor:
        whole = len(rows) == len(features)
        own = features if whole else features[upload(np.array(rows, np.int64), features.device)]
        return functional.linear(own, head.weight, head.bias)
