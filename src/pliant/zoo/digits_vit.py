"""Trains the zoo's vision transformer: a small one of timm's, which tells pairs of digits apart.

It learns whether an image shows 0 or 5, 1 or 6, 2 or 7, 3 or 8, 4 or 9, and never which of the two. Like a large model
that was trained on much, it has thus learned something else than the tasks that come later (`digits_tasks`), and
prompts have something to add to it.

timm's initial weights suit a token of 768 numbers. Here they begin larger, and positions as strong as pixels, so that
a tenth of a minute is enough to learn what else would take a whole one.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from pliant.models.vision_info import CONFIG, WEIGHTS, VisionInput, vision_input
from pliant.torchvision_ops import declare
from pliant.training.vision import Examples, Features, Recipe, fit, normalised
from pliant.zoo import digits
from pliant.zoo.repeatable import repeatable
from pliant.zoo.shapes import Progress, VitShape

declare()
import timm  # noqa: E402
from timm.models import VisionTransformer  # noqa: E402

SEED = 0
_BATCH = 16
_POSITIONS = 25
"""How many times as strong as timm's positions begin."""


@dataclass(frozen=True)
class Result:
    """What training gave: `accuracy` on the profiling images."""

    accuracy: float
    parameters: int


def train(shape: VitShape, folder: Path, report: Progress) -> Result:
    """Train a model of `shape` from nothing and save it to `folder`, as timm reads it; same seed, same weights."""
    config = shape.config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    info = vision_input(config, str(folder))
    with repeatable(SEED):
        model = create(folder, weight_init="jax")
        with torch.no_grad():
            model.get_parameter("pos_embed").mul_(_POSITIONS)
        _fit(model, shape, *_inputs(digits.training(), info), report)
        accuracy = _accuracy(model, *_inputs(digits.profiling(), info))
    save_file(model.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})
    report("learning", 1.0)
    return Result(accuracy, sum(map(torch.numel, model.parameters())))


def create(folder: Path, **how: Any) -> VisionTransformer:
    """The model in `folder`, as timm makes it."""
    return cast(VisionTransformer, timm.create_model(f"local-dir:{folder}", **how))


def prompted(model: VisionTransformer) -> Features:
    """The features of a frozen model without prompts or with some; it merges no tokens, which its kernel does."""

    def features(images: Tensor, gamma: int = 0, prompts: Tensor | None = None) -> Tensor:
        if prompts is None:
            plain: Tensor = model.forward_head(model.forward_features(images), pre_logits=True)
            return plain
        x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        tokens = x.shape[1]
        for block, added in zip(model.blocks, prompts[0], strict=True):
            x = block(torch.cat([x, added.expand(len(x), -1, -1)], 1))[:, :tokens]
        found: Tensor = model.forward_head(model.norm(x), pre_logits=True)
        return found

    return features


def _inputs(examples: Examples, info: VisionInput) -> tuple[Tensor, Tensor]:
    """Images [n, channels, height, width], and which group each shows [n]."""
    return normalised(examples.images, info), torch.from_numpy(digits.group(examples.labels))


def _fit(model: VisionTransformer, shape: VitShape, images: Tensor, labels: Tensor, report: Progress) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05, fused=True)

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)
    recipe = Recipe(_BATCH, shape.epochs, shape.learning_rate)
    model.train()
    fit(optimizer, recipe, labels, lambda rows: model(images[rows]), lambda done: report("learning", done))
    model.eval()


@torch.no_grad()
def _accuracy(model: VisionTransformer, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).double().mean())
