"""Trains a task of a vision service on a frozen backbone: a head, and prompts for each gamma above 0 (OTAS §III-B, §V).

The head learns first, from the backbone's own features; then each gamma's prompts learn to make it right more often,
separately and from random numbers. Every accuracy is measured on profiling images, which training has not seen and the
task's folder keeps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from pliant.formats.vision_task import HEAD_BIAS, HEAD_WEIGHT, PROFILING, WEIGHTS, prompts_name, write_description
from pliant.models.vision_info import VisionInfo, VisionInput

Progress = Callable[[str, float], object]
"""Called with what is being done and the fraction done."""
_ROWS = 64
"""In one run that needs no gradients."""
_WARM_UP = 0.1
_PROMPT_SCALE = 0.25
"""The deviation of random prompts. A layer's norm undoes it: it says how far a step of training turns them."""


class Features(Protocol):
    """A frozen backbone under any gamma: what its head takes, [n, hidden], of normalised images [n, channels, h, w].

    With gamma > 0, `prompts` are [1, layers, gamma, hidden]; gradients flow to them.
    """

    def __call__(self, images: Tensor, gamma: int = 0, prompts: Tensor | None = None) -> Tensor: ...


class Examples(NamedTuple):
    """Images as bytes [n, height, width, channels] of the backbone's input size, and the index of each one's label."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


class Task(NamedTuple):
    """What a task is called and promises."""

    name: str
    labels: Sequence[str]
    slo_ms: float
    utility: float


@dataclass(frozen=True)
class Recipe:
    """How head and prompts learn; by default as in the paper's §V."""

    batch: int = 32
    epochs: int = 50
    learning_rate: float = 0.002
    """At its peak: it rises over the first tenth of the steps, and falls to nothing."""
    seed: int = 0


class Head(NamedTuple):
    """What turns features into logits."""

    weight: Tensor
    """[labels, hidden]"""
    bias: Tensor
    """[labels]"""


@dataclass(frozen=True)
class Trainer:
    """Trains tasks of the backbone `info`, whose features `features` computes on `device`."""

    features: Features
    info: VisionInfo
    head: Recipe = Recipe()
    prompts: Recipe = Recipe()
    device: str = "cpu"

    def train(
        self,
        task: Task,
        training: Examples,
        profiling: Examples,
        gammas: Sequence[int],
        folder: Path,
        report: Progress,
    ) -> dict[int, float]:
        """Train `task` with prompts for those of `gammas` above 0 and write it to `folder`; same seed, same tensors.

        Returns its accuracies on the profiling images by gamma, for all of `gammas` and 0.
        """
        prompts = {}
        with torch.random.fork_rng(devices=[]):
            head = self._train_head(training, len(task.labels), lambda done: report("learning a head", 0.0))
            learned = sorted({gamma for gamma in gammas if gamma > 0})
            for index, gamma in enumerate(learned):

                def share(done: float, index: int = index, gamma: int = gamma) -> object:
                    return report(f"learning {gamma} prompts a layer", (index + done) / len(learned))

                prompts[gamma] = self._train_prompts(training, head, gamma, share)
        accuracies = {
            gamma: self.accuracy(profiling, head, gamma, prompts.get(gamma)) for gamma in sorted({0, *gammas})
        }
        _write(folder, task, head, prompts, profiling, accuracies)
        report("learning", 1.0)
        return accuracies

    def accuracy(self, examples: Examples, head: Head, gamma: int = 0, prompts: Tensor | None = None) -> float:
        """The share of images that get the right label; `prompts` are [layers, gamma, hidden]."""
        predicted = functional.linear(self._all_features(examples, gamma, prompts), *head).argmax(1)
        return float((predicted.cpu() == torch.from_numpy(examples.labels)).double().mean())

    def _train_head(self, examples: Examples, labels: int, report: Callable[[float], object]) -> Head:
        torch.manual_seed(self.head.seed)
        features = self._all_features(examples, 0, None)
        weight = torch.zeros(labels, self.info.hidden, device=self.device, requires_grad=True)
        bias = torch.zeros(labels, device=self.device, requires_grad=True)

        def logits(rows: Tensor) -> Tensor:
            return functional.linear(features[rows], weight, bias)

        optimizer = torch.optim.AdamW((weight, bias), weight_decay=0.0)
        fit(optimizer, self.head, torch.from_numpy(examples.labels), logits, report)
        return Head(weight.detach(), bias.detach())

    def _train_prompts(self, examples: Examples, head: Head, gamma: int, report: Callable[[float], object]) -> Tensor:
        """Random prompts that learn to make the frozen head right."""
        torch.manual_seed(self.prompts.seed)
        shape = (self.info.layers, gamma, self.info.hidden)
        prompts = (torch.randn(shape) * _PROMPT_SCALE).to(self.device).requires_grad_()

        def logits(rows: Tensor) -> Tensor:
            images = self._normalised(examples.images[rows.numpy()])
            return functional.linear(self.features(images, gamma, prompts[None]), *head)

        optimizer = torch.optim.AdamW((prompts,), weight_decay=0.0)
        fit(optimizer, self.prompts, torch.from_numpy(examples.labels), logits, report)
        return prompts.detach()

    @torch.no_grad()
    def _all_features(self, examples: Examples, gamma: int, prompts: Tensor | None) -> Tensor:
        """[n, hidden]"""
        given = None if prompts is None else prompts[None]
        parts = range(0, len(examples.images), _ROWS)
        found = (self._normalised(examples.images[start : start + _ROWS]) for start in parts)
        return torch.cat([self.features(images, gamma, given) for images in found])

    def _normalised(self, images: NDArray[np.uint8]) -> Tensor:
        return normalised(images, self.info).to(self.device)


def fit(
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    labels: Tensor,
    logits: Callable[[Tensor], Tensor],
    report: Callable[[float], object],
) -> None:
    """Take the recipe's steps towards `labels` [n], whose `logits` are asked for by rows; its seed is not used."""
    batches = torch.split(torch.cat([torch.randperm(len(labels)) for _ in range(recipe.epochs)]), recipe.batch)
    for step, rows in enumerate(batches):
        done = step / len(batches)
        report(done)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (done + 1 / len(batches)) / _WARM_UP) * (1 - done)
        found = logits(rows)
        functional.cross_entropy(found, labels[rows].to(found.device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def normalised(images: NDArray[np.uint8], info: VisionInput) -> Tensor:
    """Images as bytes [n, height, width, channels] as the model's input [n, channels, height, width]."""
    values = torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (info.mean, info.std))
    return ((values - mean) / std).contiguous()


def _write(
    folder: Path,
    task: Task,
    head: Head,
    prompts: Mapping[int, Tensor],
    profiling: Examples,
    accuracies: Mapping[int, float],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {HEAD_WEIGHT: head.weight, HEAD_BIAS: head.bias}
    tensors |= {prompts_name(gamma): tensor for gamma, tensor in prompts.items()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    held = {"images": profiling.images, "labels": profiling.labels}
    save_file({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in held.items()}, folder / PROFILING)
    write_description(folder, task.name, task.labels, task.slo_ms, task.utility, accuracies)
