"""What requests change in the logits before a token is chosen: biases, bans, penalties, masks of grammars.

All of it is known by slot and place in the answer, so that an edit does not depend on the batch. Where nobody asks for
an edit, it has neither memory nor work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.decoder.decode_step import RowMasks
from pliant.kernels.upload import upload
from pliant.sampling import Sampling

_FOREVER = 2**62
_LEAST_WIDTH = 16
Ids = NDArray[np.int32]
_BANS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(
    np.float32
)
"""By a byte of a mask: what is added to the logits of its eight tokens."""


class Biases:
    """What is added to the logits of single tokens, by slot, in places of the answer below a bound."""

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self._ids = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(slots, 0, device=device)
        self._until = torch.zeros(slots, 0, dtype=torch.int64, device=device)

    @property
    def parameters(self) -> list[Tensor]:
        """All that belongs to slots, [slots, …] each."""
        return [self._ids, self._values, self._until]

    def set(self, slot: int, sampling: Sampling) -> None:
        biases = [(token, value, _FOREVER) for token, value in sampling.logit_bias]
        biases += [(token, -np.inf, sampling.min_tokens) for token in sampling.ends if sampling.min_tokens]
        self._grow(len(biases))
        width = self._ids.shape[1]
        if not width:
            return
        ids, values, until = zip(*biases, *[(0, 0.0, 0)] * (width - len(biases)), strict=True)
        device = self._ids.device
        self._ids[slot] = upload(np.array(ids, np.int64), device)
        self._values[slot] = upload(np.array(values, np.float32), device)
        self._until[slot] = upload(np.array(until, np.int64), device)

    def _grow(self, width: int) -> None:
        missing = width - self._ids.shape[1]
        if missing > 0:
            more = max(_LEAST_WIDTH, 1 << (width - 1).bit_length()) - self._ids.shape[1]
            pad = torch.nn.functional.pad
            self._ids, self._values, self._until = (pad(each, (0, more)) for each in self.parameters)

    def add(self, scores: Tensor, slots: slice | Tensor, indices: Tensor) -> Tensor:
        """`scores` [n, vocab] with the biases of each row's slot, at the place `indices` [n] of its answer."""
        values = torch.where(indices[:, None] < self._until[slots], self._values[slots], 0.0)
        return scores.scatter_add(1, self._ids[slots], values)


class Penalties:
    """What each slot's text has said, and how much less likely that makes a token.

    Tokens are kept by their place in the answer, and a row reads those before its own place only.
    """

    def __init__(self, slots: int, vocab: int, longest: int, device: torch.device | str) -> None:
        self._vocab = vocab
        self._prompts = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        self._answers = torch.zeros(slots, longest, dtype=torch.int64, device=device)
        self._presence = torch.zeros(slots, device=device)
        self._frequency = torch.zeros(slots, device=device)
        self._repetition = torch.ones(slots, device=device)

    @property
    def parameters(self) -> list[Tensor]:
        """All that belongs to slots, [slots, …] each."""
        return [self._prompts, self._answers, self._presence, self._frequency, self._repetition]

    def set(self, slot: int, sampling: Sampling, prompt: Ids, answer: Ids) -> None:
        device = self._answers.device
        self._presence[slot].fill_(sampling.presence_penalty)
        self._frequency[slot].fill_(sampling.frequency_penalty)
        self._repetition[slot].fill_(sampling.repetition_penalty)
        if not sampling.penalized:
            return
        self._prompts[slot].zero_().index_fill_(0, upload(prompt.astype(np.int64), device), True)
        self._answers[slot, : len(answer)] = upload(answer.astype(np.int64), device)

    def record(self, slots: Tensor, indices: Tensor, tokens: Tensor) -> None:
        """Each slot's answer has this token at this place."""
        self._answers[slots, indices] = tokens

    def subtract(self, scores: Tensor, slots: slice | Tensor, indices: Tensor, longest: int | None) -> Tensor:
        """`scores` [n, vocab] after the penalties of each row's slot, at the place `indices` [n] of its answer.

        Of answers no more than the first `longest` tokens are read, if that is known.
        """
        answers = self._answers[:, :longest][slots]
        places = torch.arange(answers.shape[1], device=answers.device)
        before = places < indices[:, None]
        answers = torch.where(before, answers, places % self._vocab)  # a GPU adds slowly where all add to one token
        counts = torch.zeros_like(scores).scatter_add_(1, answers, before.to(scores.dtype))
        said = counts > 0
        factor = self._repetition[slots][:, None]
        repeated = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(said | self._prompts[slots], repeated, scores)
        return scores - counts * self._frequency[slots][:, None] - said * self._presence[slots][:, None]


def ban(scores: Tensor, masks: RowMasks) -> Tensor:
    """`scores` [n, vocab] with -inf for the tokens that `masks` do not allow, and for those beyond their bits.

    A CPU looks up eight bits at a time, row by row, which is ten times as fast there as to choose by flags. The bits,
    not what is made of them, go to a GPU.
    """
    vocab = scores.shape[1]
    width = min(vocab, 32 * masks.bits.shape[1])
    if scores.is_cpu:
        banned = scores.clone()
        values = banned.numpy()
        for row, bits in zip(masks.rows.tolist(), masks.bits, strict=True):
            values[row, :width] += _BANS.take(bits.view(np.uint8), axis=0).ravel()[:width]
            values[row, width:] = -np.inf
        return banned
    places = torch.arange(32, device=scores.device, dtype=torch.int32)
    words = upload(masks.bits.view(np.int32), scores.device)
    allowed = ((words[:, :, None] >> places) & 1).bool().flatten(1)[:, :width]
    allowed = torch.nn.functional.pad(allowed, (0, vocab - width))
    rows = upload(masks.rows, scores.device)
    return scores.index_copy(0, rows, scores[rows].masked_fill(~allowed, -torch.inf))


def moved(parameters: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Each target slot takes over what belongs to its source slot."""
    for parameter in parameters:
        parameter[targets] = parameter[sources]
