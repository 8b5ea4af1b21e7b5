"""How the texts of one pass lie beside each other: padded to one length, or packed one behind the other.

All else that an encoder computes is done for each token alone, so that states are [tokens, hidden] throughout, and only
a layout knows which tokens are a text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pliant.kernels.encoder.importance import received_in

Bias = Callable[[Tensor, Tensor], Tensor]
"""What relative positions add to scores: of queries [n, heads, attending, dim] and keys [n, heads, length, dim], which
both begin at the first token, [n or 1, heads, attending, length]."""


class Layout(Protocol):
    """Which tokens of a pass are a text. Tokens lie in one row; padding, if any, belongs to them."""

    longest: int
    """Tokens of the longest text, or to which all are padded."""

    @property
    def positions(self) -> Tensor:
        """Of each token in its text, from 0: int64 [tokens]."""

    def counted(self, chosen: Tensor) -> Tensor:
        """How many of the `chosen` (bool [tokens]) there are in a token's text up to the token: int64 [tokens]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, window: int | None, firsts: bool) -> Tensor:
        """Attention within each text, of queries, keys and values [tokens, heads, dim]: [tokens, heads * dim].

        `window` is how many tokens to either side are attended to; None: all. With `firsts` only of each text's first
        token: [texts, heads * dim].
        """

    def firsts(self, x: Tensor) -> Tensor:
        """The rows of `x` [tokens, …] that belong to first tokens."""

    def pool(self, states: Tensor, how: str) -> Tensor:
        """float32 [texts, hidden] of [tokens, hidden], by one of `encoder_head.POOLINGS`."""


class Padded:
    """`texts` texts, each padded to `width` tokens.

    `mask` [texts, width] is 1 for texts' tokens, which come first, and 0 for padding; without one, nothing is padded,
    which is faster.
    """

    def __init__(self, like: Tensor, mask: Tensor | None) -> None:
        self.texts, self.longest = like.shape
        self.mask = mask
        self._device = like.device
        self._open = None if mask is None else mask[:, None, None].bool()

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.longest, device=self._device).repeat(self.texts)

    def counted(self, chosen: Tensor) -> Tensor:
        return self._apart(chosen).cumsum(1).flatten()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, window: int | None, firsts: bool) -> Tensor:
        q, k, v = (self._apart(each).transpose(1, 2) for each in (q, k, v))
        if firsts:
            q = q[:, :, :1]
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(q, k, bias, window))
        return found.transpose(1, 2).flatten(2).flatten(0, 1)

    def firsts(self, x: Tensor) -> Tensor:
        return self._apart(x)[:, 0]

    def pool(self, states: Tensor, how: str) -> Tensor:
        states = self._apart(states).float()
        if how == "cls":
            return states[:, 0]
        mask = torch.ones(states.shape[:2], device=states.device) if self.mask is None else self.mask.float()
        if how == "lasttoken":
            last = mask.sum(1).long() - 1
            return states[torch.arange(self.texts, device=states.device), last]
        if how == "max":
            return states.masked_fill(mask[:, :, None] == 0, -torch.inf).amax(1)
        if how == "weightedmean":
            mask = mask * (torch.arange(self.longest, device=states.device) + 1)
        total, count = (states * mask[:, :, None]).sum(1), mask.sum(1, keepdim=True)
        return total / (count.sqrt() if how == "mean_sqrt_len_tokens" else count)

    def _apart(self, x: Tensor) -> Tensor:
        return x.view(self.texts, self.longest, *x.shape[1:])

    def _mask(self, q: Tensor, k: Tensor, bias: Bias | None, window: int | None) -> Tensor | None:
        """What is added to scores, or which of them count; None: all as they are."""
        among = self._open
        if window is not None:
            near = _near(q.shape[2], k.shape[2], window, q.device)
            itself = _near(q.shape[2], k.shape[2], 0, q.device)  # for padding that is near to none else
            among = near if among is None else among & near | itself
        if bias is None:
            return among
        added = bias(q, k)
        return added if among is None else added.masked_fill(~among, -torch.inf)


class Stepwise(Padded):
    """The same step by step, so that attention weights can be added up to the importance of each token."""

    def __init__(self, like: Tensor, mask: Tensor | None) -> None:
        super().__init__(like, mask)
        self.received = torch.zeros_like(like, dtype=torch.float32)
        """[texts, width]: what each token received in the layers so far (see `importance.received`)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, window: int | None, firsts: bool) -> Tensor:
        q, k, v = (self._apart(each).transpose(1, 2) for each in (q, k, v))
        scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(2, 3)
        mask = self._mask(q, k, bias, window)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        weights = scores.softmax(-1)
        self.received = self.received + received_in(weights, self.mask)
        if firsts:
            weights = weights[:, :, :1]
        return (weights @ v).transpose(1, 2).flatten(2).flatten(0, 1)


class Packed:
    """Texts of `lengths` tokens, one behind the other, without padding."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        self.longest = max(lengths)
        self._lengths = torch.tensor(lengths, device=device)
        self._bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
        self._starts = self._bounds[:-1]
        self._split = list(lengths)
        self._device = device

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(length, device=self._device) for length in self._split])

    def counted(self, chosen: Tensor) -> Tensor:
        return torch.cat([part.cumsum(0) for part in torch.split(chosen, self._split)])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None, window: int | None, firsts: bool) -> Tensor:
        if bias is None and q.is_cuda:
            from pliant.kernels.triton_attention import attend  # which a CPU has not

            return attend(q, k, v, self._bounds, self.longest, window, firsts)
        found = []
        for parts in zip(*(torch.split(each, self._split) for each in (q, k, v)), strict=True):
            queries, keys, values = (part.transpose(0, 1)[None] for part in parts)
            if firsts:
                queries = queries[:, :, :1]
            mask = None if bias is None else bias(queries, keys)
            if window is not None and keys.shape[2] > window + 1:
                near = _near(queries.shape[2], keys.shape[2], window, self._device)
                mask = near if mask is None else mask.masked_fill(~near, -torch.inf)
            mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            found.append(mixed[0].transpose(0, 1).flatten(1))
        return torch.cat(found)

    def firsts(self, x: Tensor) -> Tensor:
        return x[self._starts]

    def pool(self, states: Tensor, how: str) -> Tensor:
        if how in ("cls", "lasttoken"):
            return states[self._starts + (self._lengths - 1 if how == "lasttoken" else 0)].float()
        states = states.float()
        if how == "max":
            return torch.segment_reduce(states, "max", lengths=self._lengths)
        weights = torch.ones(len(states), device=states.device) if how != "weightedmean" else self.positions + 1.0
        total = torch.segment_reduce(states * weights[:, None], "sum", lengths=self._lengths)
        count = torch.segment_reduce(weights, "sum", lengths=self._lengths)[:, None]
        return total / (count.sqrt() if how == "mean_sqrt_len_tokens" else count)


def _near(attending: int, length: int, window: int, device: torch.device | str) -> Tensor:
    """Which of `length` tokens each of the first `attending` has within its window: bool [attending, length]."""
    places = torch.arange(length, device=device)
    return (places - places[:attending, None]).abs() <= window
