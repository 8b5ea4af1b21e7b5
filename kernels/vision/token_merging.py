"""Merges the most alike tokens of a vision transformer's layer, so that what follows computes fewer (OTAS §II-C).

Bipartite soft matching: the patch tokens of a sample are dealt out by turns to two sides. Each of the one side finds
the most alike of the other, and the r pairs that are most alike become one token each, the mean of all patches that it
stands for. Prefix tokens (class token, registers) come first and are never merged. Attention then counts a token as
often as it has patches (`log_sizes`), as if they were still there side by side.

Everything here has a fixed shape given r and waits for no GPU, so that it can be compiled and recorded.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Matching(NamedTuple):
    """Where the tokens of n samples go when r of each are merged into others."""

    kept: Tensor
    """int64 [n, tokens - r]: the old positions of tokens that stay, in their new order."""
    merged: Tensor
    """int64 [n, r]: the old positions of those that do not."""
    into: Tensor
    """int64 [n, r]: the new positions of the tokens that take them in; several may share one."""


def merges(tokens: int, prefix: int, r: int) -> int:
    """How many tokens a layer merges if it shall merge `r`: at most half of those that are no prefix."""
    return max(0, min(r, (tokens - prefix) // 2))


def token_counts(tokens: int, prefix: int, layers: int, gamma: int) -> list[int]:
    """How many tokens attention sees in each layer, given those of the plain model and the change gamma (OTAS §III-B).

    A gamma above 0 adds that many prompts to every layer, one below 0 merges as many tokens away between a layer's
    attention and its MLP.
    """
    counts = [tokens + max(0, gamma)]
    while len(counts) < layers:
        counts.append(counts[-1] - merges(counts[-1], prefix, -gamma))
    return counts


def match(keys: Tensor, prefix: int, r: int) -> Matching:
    """The `r` pairs with the most alike keys (cosine), each token paired with its best of the other side.

    `keys` [n, tokens, c] are attention's, summed or averaged over the heads; `r` is at most what `merges` allows. The
    result does not depend on the order of tokens within a side unless similarities are equal; then the first goes.
    """
    samples, tokens, _ = keys.shape
    keys = functional.normalize(keys[:, prefix:], dim=-1)
    best, partner = (keys[:, 1::2] @ keys[:, ::2].mT).max(-1)
    order = best.argsort(stable=True, descending=True)
    going, staying = order[:, :r], order[:, r:].sort(-1).values

    places = torch.arange(tokens, device=keys.device).expand(samples, -1)
    kept = torch.cat([places[:, :prefix], 2 * staying + (prefix + 1), places[:, prefix::2]], 1)
    return Matching(kept, 2 * going + (prefix + 1), partner.gather(1, going) + (prefix + staying.shape[1]))


def merge(x: Tensor, sizes: Tensor, matching: Matching) -> tuple[Tensor, Tensor]:
    """The tokens `x` [n, tokens, c] and their `sizes` [n, tokens], in patches, after merging: both [n, tokens - r, …].

    Merged tokens are means weighted by size, so that the sum of size * token stays what it was, up to rounding; all
    others stay bit by bit. `sizes` are float32 whatever the dtype of `x`.
    """
    kept, merged, into = matching
    before, going = sizes.gather(1, kept), sizes.gather(1, merged)
    after = before.scatter_add(1, into, going)
    stay = _rows(x, kept) * (before / after).unsqueeze(-1).to(x.dtype)
    join = _rows(x, merged) * (going / after.gather(1, into)).unsqueeze(-1).to(x.dtype)
    return stay.scatter_add(1, into.unsqueeze(-1).expand_as(join), join), after


def log_sizes(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention's scores so that a token counts as often as it has patches: [n, 1, 1, tokens]."""
    return sizes.log().to(dtype)[:, None, None]


def _rows(x: Tensor, positions: Tensor) -> Tensor:
    """The tokens at `positions` [n, k] of each sample; as whole rows, which is several times faster than `gather`."""
    samples, tokens, _ = x.shape
    first = torch.arange(0, samples * tokens, tokens, device=x.device).unsqueeze(1)
    return x.flatten(0, 1).index_select(0, (positions + first).flatten()).view(samples, -1, x.shape[2])
