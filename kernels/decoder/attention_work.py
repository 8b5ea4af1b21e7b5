"""Who attends to what on a GPU: the host shares a step's texts out among programs, and uploads the list with the step.

Programs get equal shares of all texts together, so that neither a long text among short ones nor a single one leaves
most of a GPU idle, and nothing depends on how long texts may get (split-KV, as in flash-decoding; Flover §V-D).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.kernels.decoder.ragged import Span

FIELDS = 7
"""Numbers of an item: the row whose text it is, the first token that asks, its position, how many tokens ask, the first
key and the one behind the last, and whether others attend to the rest of the text."""
Table = NDArray[np.int32]


class Work(NamedTuple):
    """Items, of which program p does numbers bounds[p] to bounds[p + 1]."""

    bounds: Table
    """[programs + 1]"""
    items: Table
    """[at least as many as there are, FIELDS]"""
    shares: Table
    """[rows, 2]: the first item of each row of one token, and how many it has."""


def of_singles(lengths: Table, window: int | None, programs: int, tile: int) -> Work:
    """For rows whose one token follows `lengths` others and attends to itself and those, or the last `window` of all.

    Texts are cut where multiples of `tile` tokens end. There are as many items as rows and programs together, of which
    those behind the last bound mean nothing.
    """
    rows, stops = len(lengths), lengths.astype(np.int64) + 1
    begins = np.zeros_like(stops) if window is None else np.maximum(stops - window, 0)
    ends = np.cumsum(-(-(stops - begins) // tile))
    firsts = np.concatenate([[0], ends[:-1]])
    share = max(1, -(-int(ends[-1]) // programs))
    cuts = np.union1d(firsts, np.arange(0, ends[-1], share))
    of = np.searchsorted(firsts, cuts, "right") - 1
    counts = np.bincount(of, minlength=rows)
    after = np.append(cuts[1:], ends[-1])
    items = np.zeros((rows + programs, FIELDS), np.int32)
    found = items[: len(cuts)]
    found[:, 0] = found[:, 1] = of
    found[:, 2] = lengths[of]
    found[:, 3] = 1
    found[:, 4] = begins[of] + (cuts - firsts[of]) * tile
    found[:, 5] = np.minimum(begins[of] + (after - firsts[of]) * tile, stops[of])
    found[:, 6] = counts[of] > 1
    bounds = np.searchsorted(cuts // share, np.arange(programs + 1)).astype(np.int32)
    return Work(bounds, items, np.stack([np.cumsum(counts) - counts, counts], 1).astype(np.int32))


def of_spans(singles: int, spans: Sequence[Span], window: int | None, most: int) -> Work:
    """For chunks of prompts behind so many rows of one token: `most` tokens an item, and an item a program."""
    parts, first = [np.empty((0, FIELDS), np.int32)], singles
    for row, (start, tokens) in enumerate(spans, singles):
        offsets = np.arange(0, tokens, most)
        part = np.zeros((len(offsets), FIELDS), np.int32)
        part[:, 0] = row
        part[:, 1] = first + offsets
        part[:, 2] = start + offsets
        part[:, 3] = np.minimum(tokens - offsets, most)
        part[:, 4] = 0 if window is None else np.maximum(start + offsets + 1 - window, 0)
        part[:, 5] = part[:, 2] + part[:, 3]
        parts.append(part)
        first += tokens
    items = np.concatenate(parts)
    return Work(np.arange(len(items) + 1, dtype=np.int32), items, np.empty((0, 2), np.int32))
