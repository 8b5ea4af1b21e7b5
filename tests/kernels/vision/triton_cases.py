"""Merging of tokens in Triton against the readable one: on a GPU, or in Triton's interpreter.

Not collected with the other tests, as the interpreter changes Triton for a whole process: `test_triton_merging` runs
these in one of their own. The interpreter is wrong for bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pliant.kernels.vision import token_merging, triton_merging
from pliant.kernels.vision.plain_vit import PlainViT
from pliant.kernels.vision.vit import TokenAdaptiveViT
from pliant.models.vision_info import VisionInfo, vision_input

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
SHAPES = [(5, 1, 1), (17, 0, 8), (50, 1, 13), (197, 5, 96), (260, 2, 20), (3, 1, 1)]
"""Tokens, prefix and r."""


def keys_of(samples: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A part of what a layer computes, which does not lie in one piece."""
    return torch.randn(samples, tokens, 3, heads, dim, device=DEVICE).to(dtype)[:, :, 1]


def similarities(keys: Tensor, prefix: int) -> Tensor:
    """Of each token of the first side with each of the other, float64 [n, first, others]."""
    summed = torch.nn.functional.normalize(keys.double().sum(2)[:, prefix:], dim=-1)
    return summed[:, 1::2] @ summed[:, ::2].mT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (2, 80)])
@pytest.mark.parametrize(("tokens", "prefix", "r"), SHAPES)
def test_matches(tokens: int, prefix: int, r: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Each goes to a most alike one, up to rounding, and those go that are most alike; the rest stays in order."""
    torch.manual_seed(tokens + r)
    keys = keys_of(2, tokens, heads, dim, dtype)
    kept, merged, into = (each.long() for each in triton_merging.match(keys, prefix, r))
    alike = similarities(keys, prefix)
    best = alike.amax(2)
    count = best.shape[1]
    rounding = 1e-6 if dtype is torch.float32 else 2e-3
    for sample in range(2):
        going = (merged[sample] - prefix - 1) // 2
        assert len(set(going.tolist())) == r
        partners = into[sample] - prefix - (count - r)
        assert (alike[sample, going, partners] >= best[sample, going] - rounding).all()
        staying = torch.tensor([at for at in range(count) if at not in set(going.tolist())], dtype=torch.int64)
        if len(staying):
            assert best[sample, staying].max() <= best[sample, going].min() + rounding
        places = [torch.arange(prefix), prefix + 1 + 2 * staying, torch.arange(prefix, tokens, 2)]
        assert torch.equal(kept[sample].cpu(), torch.cat(places))


@pytest.mark.parametrize("r", [1, 3, 5])
def test_the_first_of_ties_goes(r: int) -> None:
    """Of vectors of length 2, whose similarities nobody rounds."""
    torch.manual_seed(r)
    keys = 2.0 * torch.randint(2, (4, 11, 1, 4), device=DEVICE) - 1
    keys[3] = 0
    found = triton_merging.match(keys, 1, r)
    for given, wanted in zip(found, token_merging.match(keys.sum(2), 1, r), strict=True):
        assert torch.equal(given.long(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 1000])
@pytest.mark.parametrize(("tokens", "prefix", "r"), SHAPES)
def test_merges(tokens: int, prefix: int, r: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens + r)
    matching = triton_merging.match(keys_of(2, tokens, 2, 16, dtype), prefix, r)
    x, attended = (torch.randn(2, tokens, width, device=DEVICE).to(dtype) for _ in range(2))
    sizes = torch.randint(1, 9, (2, tokens), device=DEVICE).float()
    found, new_sizes = triton_merging.merge(x, attended, sizes, matching)
    readable = token_merging.Matching(*(each.long() for each in matching))
    wanted, wanted_sizes = token_merging.merge((x + attended).double(), sizes, readable)
    assert torch.equal(new_sizes, wanted_sizes)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    alone = torch.ones_like(new_sizes, dtype=torch.bool).scatter_(1, readable.into, False)
    gathered = (x + attended).gather(1, readable.kept[..., None].expand(-1, -1, width))
    assert torch.equal(found[alone], gathered[alone]), "who takes in nobody stays bit by bit"


def test_keys_that_are_no_numbers_are_like_nothing() -> None:
    keys = torch.full((1, 9, 1, 16), torch.nan, device=DEVICE)
    kept, merged, into = triton_merging.match(keys, 1, 3)
    assert kept.tolist() == [[0, 8, 1, 3, 5, 7]]
    assert merged.tolist() == [[2, 4, 6]]
    assert into.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("gamma", [-1, -4, -20])
def test_a_whole_model_computes_as_the_readable_one(gamma: int, averaged: bool) -> None:
    torch.manual_seed(0)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "model_args": {"embed_dim": 32, "depth": 3, "num_heads": 2, "img_size": 80},
        "pretrained_cfg": {"input_size": [3, 80, 80]},
    }
    prefix = 0 if averaged else 1
    info = VisionInfo(
        **vars(vision_input(config, "vit_tiny_patch16_224")), layers=3, hidden=32, patch=16, prefix=prefix
    )
    model = PlainViT(info, 2, 64, averaged).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    vit = TokenAdaptiveViT(model.to(DEVICE))
    images = torch.randn(2, 3, 80, 80, device=DEVICE)
    x = vit._embed(images)
    found = vit._merged_on_gpu(x, torch.ones(x.shape[:2], device=DEVICE), -gamma)
    readable = TokenAdaptiveViT(model.cpu())
    torch.testing.assert_close(found.cpu(), readable(images.cpu(), gamma), rtol=1e-4, atol=1e-4)
