"""What loads without timm computes what timm computes; the rest is left to timm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.vision_folders import SMALL, change_json, change_tensors, vision_folder, vision_model
from torch import Tensor

from pliant.kernels.vision import plain_vit
from pliant.kernels.vision.model import load_model
from pliant.kernels.vision.vit import TokenAdaptiveViT
from pliant.models.vision_info import CONFIG, WEIGHTS, read_vision
from pliant.torchvision_ops import declare

PLAIN: dict[str, dict[str, Any]] = {
    "class token": {},
    "average": {"global_pool": "avg"},
    "average without a class token": {"class_token": False, "global_pool": "avg"},
    "patches of 2": {"patch_size": 2},
    "grey": {"in_chans": 1},
    "wide": {"mlp_ratio": 2.0},
    "no head": {"num_classes": 0},
}
OTHERS: dict[str, dict[str, Any]] = {
    "maximum": {"global_pool": "max"},
    "both": {"global_pool": "avgmax"},
    "average, normed before": {"global_pool": "avg", "fc_norm": False},
    "average with the prefix": {"global_pool": "avg", "pool_include_prefix": True},
    "normed features": {"fc_norm": True},
    "registers": {"reg_tokens": 2},
    "pre-norm": {"pre_norm": True},
    "layer scale": {"init_values": 0.3},
    "no biases": {"qkv_bias": False},
    "positions of patches alone": {"no_embed_class": True},
    "another activation": {"act_layer": "quick_gelu"},
}
SIZES = ("tiny_patch16", "small_patch32", "small_patch16", "base_patch32", "base_patch16", "large_patch16")
NAMES = [f"vit_{size}_{side}" for size in SIZES for side in (224, 384)]


def folder(path: Path, **arguments: Any) -> Path:
    """A model with random numbers for all weights, saved as timm does."""
    model = vision_model(**arguments)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    vision_folder(path, model, model_args={**SMALL, **arguments})
    return path


def plain(path: Path) -> plain_vit.PlainViT | None:
    return plain_vit.load(path, read_vision(path))


def timms(path: Path) -> Any:
    declare()
    import timm

    model = timm.create_model(f"local-dir:{path}", pretrained=True)
    return model.eval().requires_grad_(False)


def images(path: Path) -> Tensor:
    info = read_vision(path)
    return torch.randn(3, info.channels, info.height, info.width, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("arguments", PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_model_computes_what_timm_computes(tmp_path: Path, arguments: dict[str, Any]) -> None:
    model, expected, batch = plain(folder(tmp_path, **arguments)), timms(tmp_path), images(tmp_path)
    assert model is not None
    model = model.eval().requires_grad_(False)
    torch.testing.assert_close(model(batch), expected(batch), rtol=1e-4, atol=1e-5)
    ours, theirs = TokenAdaptiveViT(model), TokenAdaptiveViT(expected)
    prompts = torch.randn(3, ours.layers, 2, ours.hidden, generator=torch.Generator().manual_seed(3))
    for gamma, given in ((0, None), (-2, None), (2, prompts)):
        torch.testing.assert_close(ours(batch, gamma, given), theirs(batch, gamma, given), rtol=1e-4, atol=1e-5)
    assert ours.numbers_per_token == theirs.numbers_per_token


@pytest.mark.parametrize("arguments", OTHERS.values(), ids=OTHERS.keys())
def test_any_other_model_is_left_to_timm(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert plain(folder(tmp_path, **arguments)) is None
    _, model = load_model(tmp_path, "float32", "cpu")
    batch = images(tmp_path)
    torch.testing.assert_close(model(batch), timms(tmp_path)(batch))


@pytest.mark.parametrize("name", NAMES)
def test_architectures_are_what_timm_builds_by_that_name(name: str) -> None:
    declare()
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    size, patch, _ = plain_vit._NAME.fullmatch(name).groups()  # type: ignore[union-attr]
    heads = model.blocks[0].attn.num_heads
    assert (model.embed_dim, len(model.blocks), heads) == plain_vit._SIZES[size]
    assert model.patch_embed.patch_size == (int(patch), int(patch))
    assert (model.global_pool, model.norm.eps) == ("token", plain_vit._EPS)
    assert isinstance(model.blocks[0].mlp.act, torch.nn.GELU)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "vit_tiny_patch16_clip_224"},
        {"model_args": {**SMALL, "num_heads": 5}},
        {"model_args": {**SMALL, "depth": 4}},
        {"model_args": {**SMALL, "something_new": 1}},
        {"model_args": {**SMALL, "global_pool": "avg"}},
    ],
    ids=["another architecture", "heads that do not fit", "another depth", "an unknown argument", "another pool"],
)
def test_a_config_that_says_more_or_otherwise_is_left_to_timm(tmp_path: Path, changes: dict[str, Any]) -> None:
    change_json(folder(tmp_path) / CONFIG, **changes)
    assert plain(tmp_path) is None


def test_weights_that_do_not_fit_are_left_to_timm(tmp_path: Path) -> None:
    folder(tmp_path)
    change_tensors(tmp_path / WEIGHTS, **{"blocks.1.norm1.weight": np.ones(7, np.float32)})
    assert plain(tmp_path) is None
