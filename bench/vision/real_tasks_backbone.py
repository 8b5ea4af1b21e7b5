"""A vision transformer of timm's for the real tasks: trained here, once, on coarse groups of their labels.

The paper's backbone has learned from ImageNet-21k and knows the tasks' images only in general. This one has seen those
meant for training, and whether one shows an animal of some kind or a vehicle, but never which: heads and prompts have
to find that out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from pliant.bench.vision.real_tasks_data import GROUPS, SIDE
from pliant.models.vision_info import CONFIG, WEIGHTS, VisionInput, vision_input
from pliant.training.vision import Examples, normalised
from pliant.zoo.digits_vit import create
from pliant.zoo.repeatable import one_thread

_SEED = 0
_WARM_UP = 0.1
_LARGEST_GRADIENT = 1.0
_SHIFT = 3
"""Pixels by which images are moved at most while it learns."""


@dataclass(frozen=True)
class Backbone:
    """Sizes and training. At its peak the learning rate is `learning_rate`."""

    layers: int = 6
    hidden: int = 96
    heads: int = 3
    epochs: int = 8
    batch: int = 64
    learning_rate: float = 1.5e-3
    version: int = 1
    """Raised whenever images, shape or training change."""

    def config(self) -> dict[str, object]:
        """Its config.json, as timm reads it: 64 tokens, and no class token."""
        sizes = {"embed_dim": self.hidden, "depth": self.layers, "num_heads": self.heads, "mlp_ratio": 2.0}
        return {
            "architecture": "vit_tiny_patch16_224",
            "num_classes": len(GROUPS),
            "num_features": self.hidden,
            "global_pool": "avg",
            "label_names": list(GROUPS),
            "model_args": {"img_size": SIDE, "patch_size": 4, "class_token": False, "global_pool": "avg", **sizes},
            "pretrained_cfg": {
                "input_size": [3, SIDE, SIDE],
                "fixed_input_size": True,
                "interpolation": "bicubic",
                "crop_pct": 1.0,
                "mean": [0.5] * 3,
                "std": [0.25] * 3,
                "first_conv": "patch_embed.proj",
                "classifier": "head",
            },
        }


def train(shape: Backbone, parts: Sequence[tuple[Examples, Sequence[int]]], folder: Path) -> None:
    """Train a model of `shape` from nothing and save it to `folder`; same seed, same weights.

    `parts` are images, and for each of their labels the index into GROUPS.
    """
    config = shape.config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    info = vision_input(config, str(folder))
    images = np.concatenate([examples.images for examples, _ in parts])
    groups = torch.from_numpy(np.concatenate([np.array(each)[examples.labels] for examples, each in parts]))
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(_SEED)
        model = create(folder, weight_init="jax")
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, fused=True)
        random = np.random.default_rng(_SEED)
        batches = torch.split(torch.cat([torch.randperm(len(groups)) for _ in range(shape.epochs)]), shape.batch)
        model.train()
        for step, rows in enumerate(batches):
            done = step / len(batches)
            for group in optimizer.param_groups:
                group["lr"] = shape.learning_rate * min(1.0, (done + 1 / len(batches)) / _WARM_UP) * (1 - done)
            given = _varied(images[rows.numpy()], info, random)
            loss = functional.cross_entropy(model(given), groups[rows], label_smoothing=0.1)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()
    save_file(model.state_dict(), folder / WEIGHTS, metadata={"format": "pt"})


def _varied(images: NDArray[np.uint8], info: VisionInput, random: np.random.Generator) -> Tensor:
    """The model's input, half of the images mirrored, and all moved by a few pixels."""
    rows, columns = random.integers(-_SHIFT, _SHIFT + 1, size=2)
    moved = np.roll(images, (int(rows), int(columns)), axis=(1, 2))
    mirrored = random.random(len(images)) < 0.5
    moved[mirrored] = moved[mirrored, :, ::-1]
    return normalised(moved, info)
