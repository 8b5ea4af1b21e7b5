"""The tokens of one pass through a decoder, row by row, and the pages in which their rows' texts lie (Flover §V).

A row is one request's: first come those of the decode step, of one token each, and then the chunks of prompts. Linear
layers see all tokens alike, and only attention looks at rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.upload import packed, unpacked, upload

Table = NDArray[np.int32]
"""The pages of one or more texts: token t of a text lies in its page number t // page, at t % page."""


class Span(NamedTuple):
    """The tokens start, …, start + tokens - 1 of a row's text."""

    start: int
    tokens: int


@dataclass(frozen=True)
class Ragged:
    """The tokens of `singles` rows of one token, and then those of a row for each of `spans`, in their order."""

    positions: Tensor
    """By token: its place in its row's text, [tokens] int32, as is the next."""
    pages: Tensor
    """By token: the page that takes its key and value."""
    tables: Tensor
    """By row: the pages of its text up to its last token here, [rows, width] int32; rows are filled up with any."""
    singles: int
    spans: tuple[Span, ...] = ()
    lengths: NDArray[np.int32] | None = None
    """The positions of the rows of one token, on the CPU, where they are known there."""
    work: dict[int | None, Any] = field(default_factory=dict)
    """By window: what a device's kernels have worked out for attention to it."""
    _tiles: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def tiles(self, most: int) -> NDArray[np.int32]:
        """The tokens cut up by row into tiles of at most `most`, [tiles, 4].

        The numbers are the row, the tile's first token of all, this token's position, and the tokens. Positions must be
        on a CPU.
        """
        if most not in self._tiles:
            singles = np.arange(self.singles, dtype=np.int32)
            parts = [np.stack([singles, singles, self.positions.numpy()[: self.singles], np.ones_like(singles)], 1)]
            first = self.singles
            for row, (start, tokens) in enumerate(self.spans, self.singles):
                begins = np.arange(0, tokens, most, dtype=np.int32)
                counts = np.minimum(tokens - begins, most)
                parts.append(np.stack([np.full_like(begins, row), first + begins, start + begins, counts], 1))
                first += tokens
            self._tiles[most] = np.ascontiguousarray(np.concatenate(parts), np.int32)
        return self._tiles[most]


def ragged(
    lengths: NDArray[np.int32], tables: Table, spans: Sequence[tuple[Span, Table]], page: int, device: torch.device
) -> Ragged:
    """Rows whose token follows `lengths` [n] others, with `tables` [n, any], and chunks with tables of their own."""
    singles = len(lengths)
    width = max([tables.shape[1], *(len(table) for _, table in spans)])
    whole = np.zeros((singles + len(spans), width), np.int32)
    whole[:singles, : tables.shape[1]] = tables
    positions, pages = [lengths], [tables[np.arange(singles), lengths // page]]
    for row, (span, table) in enumerate(spans, singles):
        whole[row, : len(table)] = table
        positions.append(np.arange(span.start, span.start + span.tokens, dtype=np.int32))
        pages.append(table[positions[-1] // page])
    at, into = (np.concatenate(parts).astype(np.int32, copy=False) for parts in (positions, pages))
    arrays = [at, into, whole]
    on_device = unpacked(upload(packed(arrays), device), arrays)
    return Ragged(*on_device, singles, tuple(span for span, _ in spans), lengths)
