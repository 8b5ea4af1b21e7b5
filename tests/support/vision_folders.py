"""Vision transformers and tasks as folders, small and with weights that mean nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from pliant.formats.vision_task import PROFILING, TASK, WEIGHTS, head_names, prompts_name, write_description
from pliant.models.vision_info import VisionInfo, read_vision
from pliant.torchvision_ops import declare

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
"""Of a VisionTransformer with 17 tokens."""


def vision_model(**changes: Any) -> Any:
    """An untrained VisionTransformer."""
    declare()
    import timm
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return timm.create_model("vit_tiny_patch16_224", **{**SMALL, **changes}).eval()


def vision_folder(folder: Path, model: Any = None, **how: Any) -> VisionInfo:
    """Saves a model as timm does."""
    declare()
    from timm.models import save_for_hf

    save_for_hf(model or vision_model(), str(folder), safe_serialization=True, **how)
    return read_vision(folder)


def task_folder(
    folder: Path,
    backbone: VisionInfo,
    labels: Sequence[str] = ("no", "yes"),
    prompts: Sequence[int] = (1, 2),
    heads: Sequence[int] = (),
    images: int = 0,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A task of random tensors, and `images` random images to profile it by."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)

    def tensor(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(np.float32)

    tensors = {}
    for gamma in (0, *heads):
        weight, bias = head_names(gamma)
        tensors |= {weight: tensor(len(labels), backbone.hidden), bias: tensor(len(labels))}
    tensors |= {prompts_name(gamma): tensor(backbone.layers, gamma, backbone.hidden) for gamma in prompts}
    save_file(tensors, folder / WEIGHTS)
    if images:
        size = (images, backbone.height, backbone.width, backbone.channels)
        pixels, answers = random.integers(0, 256, size, np.uint8), random.integers(0, len(labels), images)
        save_file({"images": pixels, "labels": answers}, folder / PROFILING)
    accuracies = {-2: 0.7, 0: 0.8, **dict.fromkeys(prompts, 0.9)}
    write_description(folder, folder.name, labels, 600, 0.5, accuracies)
    change_json(folder / TASK, **changes)
    return folder


def change_json(file: Path, **changes: Any) -> None:
    """Gives an object in a file other values."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(file: Path, without: str = "", **changes: np.ndarray[Any, Any]) -> None:
    """Gives a safetensors file other tensors, or one less."""
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != without}
    save_file({**tensors, **changes}, file)
