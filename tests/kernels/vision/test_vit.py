"""The token-adaptive forward pass: timm's own at gamma 0, and its definition, written out, at all others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.slow_vit import merged_features, prompted_features
from support.vision_folders import vision_model
from torch import Tensor

from pliant.errors import ModelError
from pliant.torchvision_ops import declare

declare()
import timm  # noqa: E402
from timm.layers import Attention, RmsNorm, SwiGLU, SwiGLUPacked  # noqa: E402
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock  # noqa: E402

from pliant.kernels.vision.vit import TokenAdaptiveViT  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"reg_tokens": 4},
    "registers alone": {"reg_tokens": 2, "class_token": False, "global_pool": "avg"},
    "registers, averaged with": {"reg_tokens": 2, "global_pool": "avg", "pool_include_prefix": True},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "average": {"global_pool": "avg"},
    "average, normed before": {"global_pool": "avg", "fc_norm": False},
    "maximum": {"global_pool": "max"},
    "both": {"global_pool": "avgmax"},
    "attention pool": {"global_pool": "map", "class_token": False},
    "patches of 2": {"patch_size": 2},
    "patches of 8": {"patch_size": 8},
    "positions of patches alone": {"no_embed_class": True, "reg_tokens": 1},
    "no positions": {"pos_embed": "none"},
    "pre-norm": {"pre_norm": True},
    "normed features": {"fc_norm": True},
    "no final norm": {"final_norm": False},
    "qk-norm": {"qk_norm": True},
    "norms within": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "layer scale": {"init_values": 0.3},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "RMS norm": {"norm_layer": RmsNorm},
    "gated MLP": {"mlp_layer": SwiGLU},
    "packed gated MLP": {"mlp_layer": SwiGLUPacked},
    "grey": {"in_chans": 1},
    "images of any size": {"dynamic_img_size": True},
    "images of any size, without a class token": {"dynamic_img_size": True, "class_token": False, "global_pool": "avg"},
}
variants = pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they bring for tensors so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def vit(**arguments: Any) -> Any:
    """A model with random numbers for all weights, those too that are 0 or 1 before training."""
    model = vision_model(**arguments)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.requires_grad_(False)


def images(model: Any, count: int = 2) -> Tensor:
    size = (count, model.in_chans, *model.patch_embed.img_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(2))


def prompts(model: Any, count: int, gamma: int) -> Tensor:
    shape = (count, len(model.blocks), gamma, model.embed_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@variants
def test_gamma_0_is_timm(arguments) -> None:
    model = vit(**arguments)
    given = images(model)
    assert torch.equal(model.head(TokenAdaptiveViT(model)(given)), model(given))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch32_224", "vit_base_patch16_clip_224"])
def test_gamma_0_is_timm_at_its_own_sizes(name) -> None:
    model = timm.create_model(name, img_size=64, num_classes=7, depth=2).eval()
    given = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(model.head(TokenAdaptiveViT(model)(given)), model(given))


@variants
def test_merges_as_defined(arguments) -> None:
    model = vit(**arguments)
    given = images(model)
    for r in (1, 3, 50):
        expected = torch.stack([merged_features(model, image, r) for image in given])
        torch.testing.assert_close(TokenAdaptiveViT(model)(given, -r), expected, rtol=1e-4, atol=1e-4)


@variants
def test_prompts_as_defined(arguments) -> None:
    model = vit(**arguments)
    given, own = images(model), prompts(model, 2, 2)
    expected = torch.stack([prompted_features(model, *pair) for pair in zip(given, own, strict=True)])
    torch.testing.assert_close(TokenAdaptiveViT(model)(given, 2, own), expected, rtol=1e-4, atol=1e-4)


def test_one_set_of_prompts_serves_all_rows() -> None:
    model = vit()
    given, own = images(model), prompts(model, 1, 3)
    features = TokenAdaptiveViT(model)
    torch.testing.assert_close(features(given, 3, own), features(given, 3, own.repeat(2, 1, 1, 1)))


@pytest.mark.parametrize("gamma", [-3, 0, 2])
def test_rows_do_not_see_each_other(gamma) -> None:
    model = vit()
    given, own = images(model, 5), prompts(model, 5, 2) if gamma > 0 else None
    features = TokenAdaptiveViT(model)
    alone = [features(given[row : row + 1], gamma, own if own is None else own[row : row + 1]) for row in range(5)]
    torch.testing.assert_close(features(given, gamma, own), torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_gradients_flow_to_prompts_alone() -> None:
    model = vit()
    own = prompts(model, 1, 2).requires_grad_()
    TokenAdaptiveViT(model)(images(model), 2, own).square().sum().backward()
    assert own.grad is not None
    assert bool((own.grad.abs().amax((0, 2, 3)) > 0).all())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_stays_as_it_was() -> None:
    model = vit()
    before = copy.deepcopy(model.state_dict())
    features = TokenAdaptiveViT(model)
    for gamma in (-3, 0, 2):
        features(images(model), gamma, prompts(model, 2, 2) if gamma > 0 else None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bfloat16() -> None:
    model = vit()
    given, own = images(model), prompts(model, 2, 2)
    half = TokenAdaptiveViT(copy.deepcopy(model).bfloat16())
    for gamma in (-3, 0, 2):
        expected = TokenAdaptiveViT(model)(given, gamma, own if gamma > 0 else None)
        found = half(given.bfloat16(), gamma, own.bfloat16() if gamma > 0 else None)
        assert found.dtype == torch.bfloat16
        difference = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(difference.median()) < 0.1


@pytest.mark.parametrize(
    ("gamma", "shape", "reason"),
    [
        (2, None, r"takes prompts of \[2, 3, 2, 24\]; got None"),
        (2, (2, 3, 1, 24), r"got \[2, 3, 1, 24\]"),
        (2, (3, 3, 2, 24), r"got \[3, 3, 2, 24\]"),
        (0, (2, 3, 2, 24), "gamma 0 takes no prompts"),
        (-1, (2, 3, 2, 24), "gamma -1 takes no prompts"),
    ],
)
def test_prompts_must_fit_gamma(gamma, shape, reason) -> None:
    model = vit()
    with pytest.raises(ValueError, match=reason):
        TokenAdaptiveViT(model)(images(model), gamma, shape and torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"global_pool": "prr"}, "pools by 'prr'"),
        ({"global_pool": ""}, "pools by ''"),
        ({"patch_drop_rate": 0.5}, "patch_drop_rate"),
        ({"block_fn": ResPostBlock}, "ResPostBlock"),
        ({"block_fn": ParallelScalingBlock}, "ParallelScalingBlock"),
        ({"attn_layer": "diff"}, "DiffAttention"),
    ],
)
def test_refuses_what_it_would_compute_wrongly(arguments, reason) -> None:
    with pytest.raises(ModelError, match=f"cannot trade tokens for time: .*{reason}.*choose one"):
        TokenAdaptiveViT(vision_model(**arguments))


def test_refuses_gated_attention() -> None:
    model = vision_model()
    model.blocks[1].attn = Attention(24, num_heads=2, gated=True)
    with pytest.raises(ModelError, match="its attention is gated; choose"):
        TokenAdaptiveViT(model)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deit_tiny_distilled_patch16_224", "VisionTransformerDistilled"),
        ("naflexvit_base_patch16_gap", "NaFlexVit"),
        ("vit_small_patch16_rope_224", "Eva"),
    ],
)
def test_refuses_other_architectures(name, kind) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, depth=1, embed_dim=16, num_heads=2)
    with pytest.raises(ModelError, match=f"it is a {kind}; choose"):
        TokenAdaptiveViT(model)
