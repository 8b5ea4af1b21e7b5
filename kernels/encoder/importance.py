"""How much attention each token of a text receives, from the pass that classifies the text (Tabi §2.3, §4.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def received(attentions: Sequence[Tensor], mask: Tensor) -> Tensor:
    """What each token receives in all, over layers, heads and the tokens that attend: float32 [n, length].

    `attentions` are the weights of each layer, [n, heads, length, length] with the attending tokens in rows, as
    `transformers` returns them. `mask` [n, length] is 1 for a text's tokens and 0 for padding, which neither attends
    nor receives: a text's importance adds up to layers * heads * its length, however far it is padded.
    """
    total = torch.zeros_like(mask, dtype=torch.float32)
    for weights in attentions:
        total = total + received_in(weights, mask)
    return total


def received_in(weights: Tensor, mask: Tensor | None) -> Tensor:
    """The same of one layer; without a mask, nothing is padded."""
    if mask is None:
        return weights.sum((1, 2), dtype=torch.float32)
    attending = mask.float().unsqueeze(-1)
    return (weights.sum(1, dtype=torch.float32) * attending).sum(1) * mask
