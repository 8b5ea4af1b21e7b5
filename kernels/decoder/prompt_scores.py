"""How likely a pass finds the tokens of prompts that it computes anyway: log probabilities, ranks and alternatives.

A pass needs logits only where a token is sampled, at the end of a prompt. For these scores it needs them behind every
token of a chunk, so that they are worked out some rows at a time, and reduced at once to what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pliant.kernels.decoder.decode_step import RowLogprobs, Step
from pliant.kernels.upload import upload

_BLOCK_VALUES = 2**24
"""Logits that are there at a time."""


class Asked(NamedTuple):
    """Of one chunk."""

    tokens: int
    alternatives: int


@dataclass(frozen=True)
class Scored:
    """The scores of n tokens, chunk by chunk as they were `asked` for; m is the most alternatives of any."""

    asked: tuple[Asked, ...]
    chosen: Tensor
    """[n] float32: log probabilities."""
    ranks: Tensor
    """[n] int64: 1 for the likeliest token."""
    top_ids: Tensor
    """[n, m] int64"""
    top: Tensor
    """[n, m] float32"""

    def on_host(self) -> Scored:
        """Copies on the CPU, there when all that was launched before is done."""
        tensors = {name: getattr(self, name) for name in ("chosen", "ranks", "top_ids", "top")}
        return replace(self, **{name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()})

    def by_chunk(self) -> list[list[RowLogprobs]]:
        rows = zip(*(each.tolist() for each in (self.chosen, self.top_ids, self.top, self.ranks)), strict=True)
        return [
            [
                RowLogprobs(chosen, ids[: chunk.alternatives], top[: chunk.alternatives], rank)
                for _, (chosen, ids, top, rank) in zip(range(chunk.tokens), rows, strict=False)
            ]
            for chunk in self.asked
        ]


class Scoring:
    """The scores that `step` asks for, which `read` takes from the logits of `blocks`, one after another."""

    def __init__(self, step: Step, vocab: int, device: torch.device) -> None:
        stops = len(step.lengths) + np.cumsum([len(chunk.ids) for chunk in step.prefills])
        rows = [
            np.arange(stop - len(chunk.ids), stop - len(chunk.ids) + len(chunk.targets))
            for chunk, stop in zip(step.prefills, stops.tolist(), strict=True)
        ]
        targets = np.concatenate([chunk.targets for chunk in step.prefills])
        self._asked = tuple(Asked(len(chunk.targets), chunk.alternatives) for chunk in step.prefills)
        self._rows = upload(np.concatenate(rows).astype(np.int64), device)
        self._targets = upload(targets.astype(np.int64), device)
        self._most = min(vocab, max(chunk.alternatives for chunk in step.prefills))
        self._block = max(1, _BLOCK_VALUES // vocab)
        self._parts: list[tuple[Tensor, ...]] = []

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Some of the pass's tokens at a time, [n] int64, and those that follow them."""
        return zip(torch.split(self._rows, self._block), torch.split(self._targets, self._block), strict=True)

    def read(self, logits: Tensor, targets: Tensor) -> None:
        """`logits` [n, vocab] are those of the next block, which `targets` [n] follow."""
        exact = logits.float()
        total = exact.logsumexp(-1, keepdim=True)
        chosen = exact.gather(1, targets[:, None])
        top, top_ids = exact.topk(self._most)
        self._parts.append(((chosen - total)[:, 0], (exact > chosen).sum(-1) + 1, top_ids, top - total))

    def scored(self) -> Scored | None:
        """Once all blocks were read; None where nobody reads them."""
        if not self._parts:
            return None
        return Scored(self._asked, *map(torch.cat, zip(*self._parts, strict=True)))
