"""Trains a task of a vision service on a frozen backbone: heads, and prompts for each gamma above 0 (OTAS §III-B, §V).

The head of gamma 0 learns first, from the backbone's own features. Beyond the paper, every other gamma gets a head of
its own. Below 0 it learns from features of merged tokens; above 0 it goes on from the head of gamma 0, together with
prompts, which begin as random numbers. Every accuracy is measured on profiling images, which training has not seen and
the task's folder keeps.
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

from pliant.formats.vision_task import PROFILING, WEIGHTS, head_names, prompts_name, write_description
from pliant.models.vision_head import Head
from pliant.models.vision_info import VisionInfo, VisionInput

Progress = Callable[[str, float], object]
"""Called with what is being done and the fraction done."""
_ROWS = 64
"""In one run that needs no gradients."""
_WARM_UP = 0.1
_PROMPT_SCALE = 0.25
"""The deviation of random prompts. A layer's norm undoes it: it says how far a step of training turns them."""
_HEAD_SHARE = 0.1
"""Of the prompts' learning rate, for a head that has learned already."""


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
        """Train `task` for `gammas` and 0, with prompts for those above 0, and write it to `folder`; same seed, same
        tensors.

        Returns its accuracies on the profiling images by gamma.
        """
        learned = sorted({*gammas} - {0}, key=lambda gamma: (gamma > 0, abs(gamma)))
        prompts: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            report("learning a head", 0.0)
            heads = {0: self._train_head(training, len(task.labels), 0)}
            for index, gamma in enumerate(learned):
                if gamma < 0:
                    report(f"learning a head for {-gamma} merged tokens a layer", index / len(learned))
                    heads[gamma] = self._train_head(training, len(task.labels), gamma)
                    continue

                def share(done: float, index: int = index, gamma: int = gamma) -> object:
                    return report(f"learning {gamma} prompts a layer", (index + done) / len(learned))

                prompts[gamma], heads[gamma] = self._train_prompts(training, heads[0], gamma, share)
        accuracies = {
            gamma: self.accuracy(profiling, heads[gamma], gamma, prompts.get(gamma)) for gamma in sorted(heads)
        }
        _write(folder, task, heads, prompts, profiling, accuracies)
        report("learning", 1.0)
        return accuracies

    def accuracy(self, examples: Examples, head: Head, gamma: int = 0, prompts: Tensor | None = None) -> float:
        """The share of images that get the right label; `prompts` are [layers, gamma, hidden]."""
        predicted = functional.linear(self._all_features(examples, gamma, prompts), *head).argmax(1)
        return float((predicted.cpu() == torch.from_numpy(examples.labels)).double().mean())

    def _train_head(self, examples: Examples, labels: int, gamma: int) -> Head:
        torch.manual_seed(self.head.seed)
        features = self._all_features(examples, gamma, None)
        weight = torch.zeros(labels, self.info.hidden, device=self.device, requires_grad=True)
        bias = torch.zeros(labels, device=self.device, requires_grad=True)

        def logits(rows: Tensor) -> Tensor:
            return functional.linear(features[rows], weight, bias)

        optimizer = torch.optim.AdamW((weight, bias), weight_decay=0.0)
        fit(optimizer, self.head, torch.from_numpy(examples.labels), logits)
        return Head(weight.detach(), bias.detach())

    def _train_prompts(
        self, examples: Examples, head: Head, gamma: int, report: Callable[[float], object]
    ) -> tuple[Tensor, Head]:
        """Random prompts, and a head that goes on from `head`, learn to be right together."""
        torch.manual_seed(self.prompts.seed)
        shape = (self.info.layers, gamma, self.info.hidden)
        prompts = (torch.randn(shape) * _PROMPT_SCALE).to(self.device).requires_grad_()
        own = Head(*(tensor.clone().requires_grad_() for tensor in head))

        def logits(rows: Tensor) -> Tensor:
            images = self._normalised(examples.images[rows.numpy()])
            return functional.linear(self.features(images, gamma, prompts[None]), *own)

        rate = self.prompts.learning_rate
        groups = [{"params": [prompts], "lr": rate}, {"params": [*own], "lr": _HEAD_SHARE * rate}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        fit(optimizer, self.prompts, torch.from_numpy(examples.labels), logits, report)
        return prompts.detach(), Head(*(tensor.detach() for tensor in own))

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
    report: Callable[[float], object] = lambda done: None,
) -> None:
    """Take the recipe's steps towards `labels` [n], whose `logits` are asked for by rows; its seed is not used, and its
    learning rate is that of the optimizer's first group, where those of others keep their ratio to it.
    """
    batches = torch.split(torch.cat([torch.randperm(len(labels)) for _ in range(recipe.epochs)]), recipe.batch)
    shares = [group["lr"] / optimizer.param_groups[0]["lr"] for group in optimizer.param_groups]
    for step, rows in enumerate(batches):
        done = step / len(batches)
        report(done)
        rate = recipe.learning_rate * min(1.0, (done + 1 / len(batches)) / _WARM_UP) * (1 - done)
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = rate * share
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
    heads: Mapping[int, Head],
    prompts: Mapping[int, Tensor],
    profiling: Examples,
    accuracies: Mapping[int, float],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {prompts_name(gamma): tensor for gamma, tensor in prompts.items()}
    for gamma, head in heads.items():
        tensors |= zip(head_names(gamma), head, strict=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    held = {"images": profiling.images, "labels": profiling.labels}
    save_file({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in held.items()}, folder / PROFILING)
    write_description(folder, task.name, task.labels, task.slo_ms, task.utility, accuracies)
