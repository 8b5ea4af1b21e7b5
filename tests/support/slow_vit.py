"""Token adaptation by its definition, one sample and one token at a time: what the kernels are tested against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def merge_sample(x: Tensor, keys: Tensor, sizes: Tensor, prefix: int, r: int) -> tuple[Tensor, Tensor]:
    """One sample's tokens [tokens, c] and sizes [tokens] after the r most alike pairs have merged."""
    ours, theirs = range(prefix + 1, len(x), 2), range(prefix, len(x), 2)
    alike = torch.cosine_similarity(keys[:, None], keys[None], dim=-1).tolist()
    pairs = []
    for a in ours:
        best = max(theirs, key=alike[a].__getitem__)
        pairs.append((alike[a][best], a, best))
    chosen = sorted(pairs, key=lambda pair: -pair[0])[:r]
    gone = {a for _, a, _ in chosen}
    groups = [[token] for token in range(prefix)] + [[a] for a in ours if a not in gone]
    groups += [[b, *(a for _, a, best in chosen if best == b)] for b in theirs]
    means = [sum(sizes[t] * x[t] for t in group) / sum(sizes[t] for t in group) for group in groups]
    return torch.stack(means), torch.stack([sizes[group].sum() for group in groups])


def merged_features(model: Any, image: Tensor, r: int) -> Tensor:
    """Features [hidden] of one image [channels, h, w], where keys and values count once for each of their patches."""
    prefix = model.num_prefix_tokens
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    sizes = torch.ones(len(x))
    for block in model.blocks:
        attended, keys = _attend(block.attn, block.norm1(x), sizes.int())
        x = x + block.ls1(attended)
        x, sizes = merge_sample(x, keys, sizes, prefix, min(r, (len(x) - prefix) // 2))
        x = x + block.ls2(block.mlp(block.norm2(x)))
    side_by_side = model.norm(x).repeat_interleave(sizes.int(), dim=0)
    return model.forward_head(side_by_side[None], pre_logits=True)[0]


def prompted_features(model: Any, image: Tensor, prompts: Tensor) -> Tensor:
    """Features [hidden] of one image, with prompts [layers, gamma, hidden] set in behind the prefix and taken out."""
    prefix, gamma = model.num_prefix_tokens, prompts.shape[1]
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))
    for block, own in zip(model.blocks, prompts, strict=True):
        x = block(torch.cat([x[:, :prefix], own[None], x[:, prefix:]], 1))
        x = torch.cat([x[:, :prefix], x[:, prefix + gamma :]], 1)
    return model.forward_head(model.norm(x), pre_logits=True)[0]


def _attend(attention: Any, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over [tokens, hidden], and the mean of its keys over heads."""
    q, k, v = attention.qkv(x).view(len(x), 3, attention.num_heads, attention.head_dim).permute(1, 2, 0, 3)
    q, k = attention.q_norm(q), attention.k_norm(k)
    every_k, every_v = k.repeat_interleave(sizes, dim=1), v.repeat_interleave(sizes, dim=1)
    mixed = functional.softmax(q @ every_k.mT * attention.head_dim**-0.5, -1) @ every_v
    return attention.proj(attention.norm(mixed.transpose(0, 1).flatten(1))), k.mean(0)
