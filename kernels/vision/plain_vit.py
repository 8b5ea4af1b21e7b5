"""Vision transformers of timm's plain kind in torch alone: timm and torchvision take 110 MB and more than a second.

Modules and weights are called as timm's are, so whatever computes with one of its models computes with these.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import GELU, Conv2d, Identity, LayerNorm, Linear, Module, Parameter, Sequential, functional

from pliant.kernels.saved_tensors import SavedTensors
from pliant.models.adapter_files import read_object
from pliant.models.vision_info import CONFIG, VisionInfo

_NAME = re.compile(r"vit_(tiny|small|base|large)_patch(8|16|32)_(224|384)")
_SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""What timm builds where a config says nothing else: numbers in a token, layers, heads."""
_SHOWN = {"img_size", "in_chans", "num_classes", "mlp_ratio", "class_token"}
"""Arguments that the weights' names and sizes tell, too."""
_EPS = 1e-6


class Attention(Module):
    """Self-attention of `heads` heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = hidden // heads
        self.qkv = Linear(hidden, 3 * hidden)
        self.q_norm = self.k_norm = self.norm = self.proj_drop = Identity()
        self.proj = Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, hidden] of as many."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        mixed: Tensor = self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Mlp(Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.fc1 = Linear(hidden, wide)
        self.act = GELU()
        self.fc2 = Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = self.fc2(self.act(self.fc1(x)))
        return after


class Block(Module):
    """A layer: attention and an MLP, each normed before and added to what it reads."""

    def __init__(self, hidden: int, heads: int, wide: int) -> None:
        super().__init__()
        self.norm1 = LayerNorm(hidden, _EPS)
        self.attn = Attention(hidden, heads)
        self.norm2 = LayerNorm(hidden, _EPS)
        self.mlp = Mlp(hidden, wide)
        self.ls1 = self.ls2 = self.drop_path1 = self.drop_path2 = Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[n, tokens, hidden] of as many."""
        x = x + self.attn(self.norm1(x))
        after: Tensor = x + self.mlp(self.norm2(x))
        return after


class PatchEmbed(Module):
    """Images to tokens."""

    def __init__(self, info: VisionInfo) -> None:
        super().__init__()
        self.num_patches = info.patches
        self.proj = Conv2d(info.channels, info.hidden, info.patch, info.patch)

    def forward(self, images: Tensor) -> Tensor:
        """[n, patches, hidden] of [n, channels, height, width]."""
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


class PlainViT(Module):
    """A vision transformer that reads its class token or, if it is to be `averaged`, the mean of its patches'."""

    pool_include_prefix = False
    attn_pool = None

    def __init__(self, info: VisionInfo, heads: int, wide: int, averaged: bool) -> None:
        super().__init__()
        self.embed_dim = info.hidden
        self.num_prefix_tokens = info.prefix
        self.global_pool = "avg" if averaged else "token"
        self.patch_embed = PatchEmbed(info)
        self.cls_token = Parameter(torch.empty(1, 1, info.hidden)) if info.prefix else None
        self.pos_embed = Parameter(torch.empty(1, info.tokens, info.hidden))
        self.patch_drop = self.norm_pre = self.head_drop = Identity()
        self.blocks = Sequential(*(Block(info.hidden, heads, wide) for _ in range(info.layers)))
        self.norm = Identity() if averaged else LayerNorm(info.hidden, _EPS)
        self.fc_norm = LayerNorm(info.hidden, _EPS) if averaged else Identity()
        self.head = Linear(info.hidden, len(info.labels)) if info.labels else Identity()

    def forward_features(self, images: Tensor) -> Tensor:
        """The last layer's tokens, normed unless they are averaged, [n, tokens, hidden]."""
        tokens: Tensor = self.norm(self.blocks(self._pos_embed(self.patch_embed(images))))
        return tokens

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits, or with `pre_logits` what the head reads, [n, hidden]."""
        pooled = x[:, self.num_prefix_tokens :].mean(1) if self.global_pool == "avg" else x[:, 0]
        features: Tensor = self.fc_norm(pooled)
        return features if pre_logits else self.head(features)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.pos_embed


def load(folder: Path, info: VisionInfo) -> PlainViT | None:
    """The model in a folder of timm's format; None if it is of any other kind, or its files do not fit together."""
    config, saved = read_object(folder / CONFIG)[0], SavedTensors(folder)
    heads = _heads(info, config)
    averaged = "fc_norm.weight" in saved.names
    if heads is None or _pool(config) != ("avg" if averaged else "token"):
        return None
    found = {name: saved[name] for name in saved.names}
    wide = found["blocks.0.mlp.fc1.bias"].numel() if "blocks.0.mlp.fc1.bias" in found else info.hidden
    with torch.device("meta"):
        model = PlainViT(info, heads, wide, averaged)
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if sizes != {name: tensor.shape for name, tensor in found.items()}:
        return None
    model.load_state_dict({name: tensor.float() for name, tensor in found.items()}, assign=True)
    return model


def _heads(info: VisionInfo, config: Mapping[str, Any]) -> int | None:
    """None if anything is asked for that `PlainViT` has not got."""
    name = _NAME.fullmatch(info.architecture)
    if name is None:
        return None
    hidden, layers, heads = _SIZES[name[1]]
    asked = {"embed_dim": hidden, "depth": layers, "num_heads": heads, "patch_size": int(name[2])}
    told = {key: value for key, value in _arguments(config).items() if key not in (*_SHOWN, "global_pool")}
    if not told.keys() <= asked.keys():
        return None
    asked |= told
    heads = asked.pop("num_heads")
    fits = asked == {"embed_dim": info.hidden, "depth": info.layers, "patch_size": info.patch}
    return heads if fits and type(heads) is int and heads > 0 and info.hidden % heads == 0 else None


def _pool(config: Mapping[str, Any]) -> Any:
    """How tokens become the head's input, in timm's words."""
    usual = config.get("pretrained_cfg", config).get("global_pool") or "token"
    return _arguments(config).get("global_pool", usual)


def _arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("model_args") or {}
