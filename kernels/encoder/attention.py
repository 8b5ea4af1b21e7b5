"""How the tokens of a text attend to each other, with or without saying how much."""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pliant.kernels.encoder.importance import received_in


class Attention(Protocol):
    """Attention within each text, in one layer after the other."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kept: int | None) -> Tensor:
        """Of queries, keys and values, each [n, heads, tokens, dim]: the same of all tokens, or of the first `kept`."""


class Fused:
    """By torch's own kernel. `mask` [n, tokens] is 1 for texts' tokens and 0 for padding; None: nothing is padded."""

    def __init__(self, mask: Tensor | None) -> None:
        self._open = None if mask is None else mask[:, None, None].bool()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kept: int | None) -> Tensor:
        return functional.scaled_dot_product_attention(q[:, :, :kept], k, v, attn_mask=self._open)


class Stepwise:
    """Step by step, so that the weights can be added up to the importance of each token; `mask` as above."""

    def __init__(self, ids: Tensor, mask: Tensor | None) -> None:
        self._mask = mask
        self._closed = None if mask is None else (mask == 0)[:, None, None]
        self.received = torch.zeros_like(ids, dtype=torch.float32)
        """[n, tokens]: what each token received in the layers so far (see `importance.received`)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, kept: int | None) -> Tensor:
        scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(2, 3)
        if self._closed is not None:
            scores = scores.masked_fill(self._closed, -torch.inf)
        weights = scores.softmax(-1)
        self.received = self.received + received_in(weights, self._mask)
        return weights[:, :, :kept] @ v
