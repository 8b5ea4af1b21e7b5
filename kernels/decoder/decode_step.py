"""One iteration of a decoder, as engine and executor speak of it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)


class Prefill(NamedTuple):
    """A chunk of a prompt: `ids` are its tokens from position `start` on, before which all of `slot` is stored."""

    slot: int
    start: int
    ids: NDArray[np.int32]
    last: bool
    """Whether it ends the prompt, so that the answer's first token follows from it."""
    pages: NDArray[np.int32]
    """Those of the slot's text, in order, up to the chunk's end at least."""
    targets: NDArray[np.int32] = _NO_IDS
    """The tokens that follow its first ones in the prompt, if their log probabilities are wanted; else none."""
    alternatives: int = 0
    """How many of the likeliest tokens in the place of each target are wanted, too."""


class RowMasks(NamedTuple):
    """Which tokens some rows may be given; all others may be given any."""

    rows: NDArray[np.int64]
    """[n], each once."""
    bits: NDArray[np.uint32]
    """[n, tokens / 32]: by row, a bit for each token, the lowest first. Tokens beyond are not allowed."""


class Step(NamedTuple):
    """One iteration, a single pass over all weights: the prefills, and one token for each slot of the window.

    The window is the slots offset, …, offset + len(lengths) - 1. Every slot in it gets a row, those too whose row means
    nothing: holes, requests that sit out, and those whose prompt is not stored whole or was completed in this very
    step. The engine ignores these rows, and the executor sees to it that their slots keep their last tokens: one that
    sits out goes on behind it, and one whose `last` prefill is in the step decodes behind what that gave it.

    `lengths[row]` counts the tokens that the slot has stored, and must be less than max_length: the row stores the key
    and value of one more. Rows that mean nothing have length 0 and only pages 0, which belongs to nobody.
    """

    prefills: tuple[Prefill, ...]
    offset: int
    lengths: NDArray[np.int32]
    tables: NDArray[np.int32]
    """By row of the window: the pages of its text, in order, up to its new token at least, [rows, any]."""
    indices: NDArray[np.int64]
    """By row of the window: the index in its answer of the token to be sampled (see `sampling`)."""
    prefill_indices: NDArray[np.int64]
    """The same for the `last` prefills, in their order."""
    masks: Callable[[], RowMasks] | None = None
    """Waits for the masks of rows of the window: asked for when the logits are under way, so that a device computes
    these meanwhile. None if there are none."""
    prefill_masks: Callable[[], RowMasks] | None = None
    """The same for the `last` prefills."""


class RowLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before temperature and filters."""

    chosen: float
    """Of the token that was chosen."""
    top_ids: list[int]
    """The likeliest tokens, likeliest first: as many as were asked for."""
    top: list[float]
    """Their log probabilities."""
    rank: int | None = None
    """Of a target of a chunk: 1 if no token is likelier."""


class Output(NamedTuple):
    """What a step sampled."""

    first: NDArray[np.int64]
    """A token for each `last` prefill, in order."""
    tokens: NDArray[np.int64]
    """A token for each row of the window; see `Step` for those to ignore."""
    first_logprobs: list[RowLogprobs | None] | None
    logprobs: list[RowLogprobs | None] | None
    """For each row what it asked for; None if no row asked."""
    targets: list[list[RowLogprobs]] | None = None
    """Those of each chunk, which are its targets'; None if there are none at all."""


class Launched(Protocol):
    """A step under way."""

    def result(self) -> Output:
        """What it sampled, as soon as the device has it. Results are read in the order of the launches, once each."""
