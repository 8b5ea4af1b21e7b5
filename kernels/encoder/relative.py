"""What relative positions add to attention scores: one number for each distance (MPNet), or products of queries and
keys with what stands for distances (DeBERTa)."""

import math

import torch
from torch import Tensor

from pliant.kernels.encoder.layout import Bias


def by_distance(table: Tensor, longest: int) -> Bias:
    """The bias that adds `table` [heads, 2 * reach - 1], which holds a number for each of `distances(reach)`."""
    among = table[:, _places(longest, table.shape[1], table.device)]
    return lambda q, k: among[None, :, : q.shape[2], : k.shape[2]]


def by_content(keys: Tensor | None, queries: Tensor | None, rows: Tensor, longest: int) -> Bias:
    """The bias of a layer of DeBERTa's for texts of up to `longest` tokens.

    `keys` and `queries` [heads, dim, 2 * buckets] stand for distances as attended and as attending ones, and `rows` is
    `disentangled_buckets`.
    """
    places = rows[_places(longest, len(rows), rows.device)]

    def bias(q: Tensor, k: Tensor) -> Tensor:
        here = places[: q.shape[2], : k.shape[2]]
        scale = 1 / math.sqrt(q.shape[-1])
        found: Tensor | None = None
        if keys is not None:
            found = ((q * scale) @ keys).gather(-1, here.expand(*q.shape[:2], -1, -1))
        if queries is not None:
            back = ((k * scale) @ queries).gather(-1, here.T.expand(*q.shape[:2], -1, -1)).transpose(2, 3)
            found = back if found is None else found + back
        assert found is not None
        return found

    return bias


def _places(longest: int, count: int, device: torch.device) -> Tensor:
    """Where the distance from each of `longest` tokens (rows) to each lies among `count` of `distances`."""
    tokens = torch.arange(longest, device=device)
    return tokens - tokens[:, None] + count // 2
