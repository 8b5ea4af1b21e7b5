"""Loads a vision transformer of timm's, and computes its features from images as bytes."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from pliant.errors import ModelError
from pliant.kernels import attention_choice
from pliant.kernels.vision import plain_vit
from pliant.kernels.vision.plain_vit import PlainViT
from pliant.kernels.vision.vit import TokenAdaptiveViT, check
from pliant.models.vision_info import WEIGHTS, VisionInfo, read_vision
from pliant.torchvision_ops import declare

if TYPE_CHECKING:
    from timm.models import VisionTransformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(folder: Path, dtype: str, device: str) -> "tuple[VisionInfo, PlainViT | VisionTransformer]":
    """The vision transformer in a folder of timm's format, ready to compute; only safetensors are read.

    timm is imported only where `plain_vit` does not know the model. Its head stays float32, as features alone are
    computed in `dtype`. Raises `ModelError`, in one line, if there is no model or it cannot trade tokens for time (see
    `vit.check`).
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is unknown: choose {' or '.join(DTYPES)}")
    attention_choice.for_device(device)
    info = read_vision(folder)
    model = plain_vit.load(folder, info) or _timms(folder)
    model = model.eval().requires_grad_(False).to(device)
    head = copy.deepcopy(model.head)
    model.to(DTYPES[dtype]).head = head
    return info, model


def _timms(folder: Path) -> "VisionTransformer":
    declare()
    import timm
    from timm.models import VisionTransformer

    try:
        model = timm.create_model(f"local-dir:{folder}")
        check(model)
        model.load_state_dict(load_file(folder / WEIGHTS))
    except ModelError:
        raise
    except Exception as error:  # timm raises whatever a broken config.json leads it to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{folder} cannot be read as a vision transformer of timm's: {reason}") from None
    assert isinstance(model, VisionTransformer)
    return model


class ImageFeatures(torch.nn.Module):
    """`vit` under one gamma, for images of `info` as bytes; what is compiled, recorded and run."""

    def __init__(self, vit: TokenAdaptiveViT, info: VisionInfo, gamma: int) -> None:
        super().__init__()
        self.vit = vit
        self.gamma = gamma
        first = next(vit.parameters())
        self.dtype = first.dtype
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(info.mean, device=first.device)[:, None, None])
        self.register_buffer("std", torch.tensor(info.std, device=first.device)[:, None, None])

    def forward(self, images: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Features [n, hidden] of uint8 images [n, height, width, channels]; `prompts` as `TokenAdaptiveViT` says."""
        values = images.permute(0, 3, 1, 2).to(torch.float32) / 255
        features: Tensor = self.vit(((values - self.mean) / self.std).to(self.dtype).contiguous(), self.gamma, prompts)
        return features
