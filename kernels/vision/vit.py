"""A timm vision transformer whose layers compute more tokens or fewer than the images have (OTAS §III-B).

The change per layer is gamma. Above 0, that many prompt tokens join every layer, learned for a task: they are set
before the layer's norm and replaced by the next layer's own. Below 0, as many tokens are merged away in every layer
between attention and MLP. At 0 it is the model itself. The weights are timm's in all three cases.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from pliant.errors import ModelError
from pliant.kernels.vision import plain_vit
from pliant.kernels.vision.plain_vit import PlainViT
from pliant.kernels.vision.token_merging import log_sizes, match, merge, merges
from pliant.torchvision_ops import declare

if TYPE_CHECKING:
    from timm.layers.attention import Attention
    from timm.models.vision_transformer import VisionTransformer

_VECTOR = 16
_POOLS = ("token", "avg", "avgmax", "max", "map")


class TokenAdaptiveViT(torch.nn.Module):
    """`model` under any gamma; raises `ModelError` if it is no plain vision transformer (see `check`).

    `model` is used as it is, in its mode, dtype and device, and is not changed.
    """

    def __init__(self, model: PlainViT | VisionTransformer) -> None:
        super().__init__()
        check(model)
        self.model = model
        self._blocks: list[Any] = list(model.blocks)
        self.layers = len(self._blocks)
        self.hidden = model.embed_dim
        self.prefix = model.num_prefix_tokens
        self.tokens = model.patch_embed.num_patches + self.prefix
        """Of an image, prefix tokens included."""

    @property
    def numbers_per_token(self) -> int:
        """The most that a layer holds of one token at a time, about: what its widest step reads and writes, twice."""
        linears = (part for part in self.model.blocks.modules() if isinstance(part, torch.nn.Linear))
        return 2 * self.hidden + 2 * max(linear.out_features for linear in linears)

    def forward(self, images: Tensor, gamma: int = 0, prompts: Tensor | None = None) -> Tensor:
        """What timm's head takes, [n, hidden], of normalised images [n, channels, h, w].

        With gamma > 0, `prompts` are [n, layers, gamma, hidden], or [1, …] for all alike; gradients flow to them.
        A layer merges at most half of its tokens, those of the prefix aside. Raises ValueError if prompts and gamma do
        not fit.
        """
        self._check(images.shape[0], gamma, prompts)
        if prompts is not None:
            return self._prompted(self._embed(images), prompts)
        if gamma < 0:
            return self._merged(self._embed(images), -gamma)
        features: Tensor = self.model.forward_head(self.model.forward_features(images), pre_logits=True)
        return features

    def _check(self, rows: int, gamma: int, prompts: Tensor | None) -> None:
        shape = None if prompts is None else tuple(prompts.shape)
        needed = (self.layers, gamma, self.hidden)
        if gamma <= 0 and shape is not None:
            raise ValueError(f"gamma {gamma} takes no prompts; got a tensor of {list(shape)}")
        if gamma > 0 and (shape is None or shape[1:] != needed or shape[0] not in (1, rows)):
            raise ValueError(f"gamma {gamma} takes prompts of {[rows, *needed]}; got {shape and list(shape)}")

    def _embed(self, images: Tensor) -> Tensor:
        model = self.model
        x: Tensor = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        return x

    def _prompted(self, x: Tensor, prompts: Tensor) -> Tensor:
        """Prompts come last and each layer's overwrite those before: attention sees no order, and nothing is moved."""
        tokens = x.shape[1]
        prompts = prompts.to(x.dtype).expand(x.shape[0], -1, -1, -1)
        x = torch.cat([x, prompts[:, 0]], 1)
        for layer, block in enumerate(self._blocks):
            if layer:
                x[:, tokens:] = prompts[:, layer]
            x = block(x)
        features: Tensor = self.model.forward_head(self.model.norm(x[:, :tokens]), pre_logits=True)
        return features

    def _merged(self, x: Tensor, r: int) -> Tensor:
        sizes = torch.ones(x.shape[:2], device=x.device)
        if x.is_cuda:
            return self._merged_on_gpu(x, sizes, r)
        bias = None
        for block in self._blocks:
            attended, keys = attend(block.attn, block.norm1(x), bias)
            x = x + block.drop_path1(block.ls1(attended))
            if count := merges(x.shape[1], self.prefix, r):
                x, sizes = merge(x, sizes, match(keys, self.prefix, count))
                bias = log_sizes(sizes, x.dtype)
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        return self._pooled(self.model.norm(x), sizes)

    def _merged_on_gpu(self, x: Tensor, sizes: Tensor, r: int) -> Tensor:
        """The same, in fewer launches."""
        from pliant.kernels.vision import triton_merging  # which a CPU has not

        for block in self._blocks:
            attended, keys = _attend_on_gpu(block.attn, block.norm1(x), sizes)
            attended = block.drop_path1(block.ls1(attended))
            if count := merges(x.shape[1], self.prefix, r):
                x, sizes = triton_merging.merge(x, attended, sizes, triton_merging.match(keys, self.prefix, count))
            else:
                x = x + attended
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        return self._pooled(self.model.norm(x), sizes)

    def _pooled(self, x: Tensor, sizes: Tensor) -> Tensor:
        """As timm's `forward_head`, where a token counts as often as it has patches."""
        model = self.model
        if model.global_pool == "token":
            pooled = x[:, 0]
        else:
            first = 0 if model.pool_include_prefix else self.prefix
            pooled = self._pooled_over(x[:, first:], sizes[:, first:])
        features: Tensor = model.head_drop(model.fc_norm(pooled))
        return features

    def _pooled_over(self, x: Tensor, sizes: Tensor) -> Tensor:
        model = self.model
        if model.attn_pool is not None:
            pooled: Tensor = model.attn_pool(x, attn_mask=log_sizes(sizes, x.dtype))
            return pooled
        if model.global_pool == "max":
            return x.amax(1)
        mean = ((sizes / sizes.sum(1, keepdim=True)).unsqueeze(1).to(x.dtype) @ x).squeeze(1)
        return mean if model.global_pool == "avg" else 0.5 * (x.amax(1) + mean)


def attend(attention: plain_vit.Attention | Attention, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """timm's attention over `x` [n, tokens, hidden] with `bias` added to its scores, and its keys summed over heads."""
    samples, tokens, _ = x.shape
    qkv = attention.qkv(x).view(samples, tokens, 3, attention.num_heads, attention.head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    q, k = attention.q_norm(q), attention.k_norm(k)
    mixed = attention.norm(_mix(q, k, v, bias).transpose(1, 2).flatten(2))
    out: Tensor = attention.proj_drop(attention.proj(mixed))
    return out, functools.reduce(torch.add, k.unbind(1))


def _attend_on_gpu(attention: plain_vit.Attention | Attention, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """As `attend`, where a key counts as often as `sizes` [n, tokens] say, and its keys [n, tokens, heads, dim]."""
    from pliant.kernels.triton_attention import attend as attend_packed

    samples, tokens, _ = x.shape
    q, k, v = attention.qkv(x).view(samples, tokens, 3, attention.num_heads, attention.head_dim).unbind(2)
    q, k = attention.q_norm(q), attention.k_norm(k)
    starts = torch.arange(0, (samples + 1) * tokens, tokens, device=x.device)
    packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    mixed = attend_packed(*packed, starts, tokens, None, False, sizes.flatten()).view(samples, tokens, -1)
    out: Tensor = attention.proj_drop(attention.proj(attention.norm(mixed)))
    return out, k


def _mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention; with a bias, over keys padded to whole vectors: what is left over costs CPUs up to twice the time."""
    tokens = k.shape[2]
    if bias is not None and tokens % _VECTOR > 1:
        rest = -tokens % _VECTOR
        k, v = functional.pad(k, (0, 0, 0, rest)), functional.pad(v, (0, 0, 0, rest))
        bias = functional.pad(bias, (0, rest), value=-torch.inf)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def check(model: torch.nn.Module) -> None:
    """Raise `ModelError` unless tokens can be added to `model` and merged in it as this module does."""
    if reason := _refusal(model):
        raise ModelError(f"this model cannot trade tokens for time: {reason}")


def _refusal(model: torch.nn.Module) -> str | None:
    if isinstance(model, PlainViT):
        return None
    declare()
    from timm.layers.attention import Attention
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(model) is not VisionTransformer:
        return f"it is a {type(model).__name__}; choose a plain VisionTransformer of timm's"
    if model.global_pool not in _POOLS:
        return f"it pools by {model.global_pool!r}; choose one that pools by {', '.join(_POOLS)}"
    if not isinstance(model.patch_drop, torch.nn.Identity):
        return "it drops patches (patch_drop_rate); choose one that keeps them"
    for block in model.blocks:
        if type(block) is not Block:
            return f"its layers are {type(block).__name__}; choose one of plain Blocks"
        if type(block.attn) is not Attention:
            return f"its attention is {type(block.attn).__name__}; choose one of plain Attention"
        if getattr(block.attn, "gate", None) is not None:
            return "its attention is gated; choose one of plain Attention"
    return None
