"""What transformers says of how likely the tokens of a prompt are, compared with what we do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from support.decoders import logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR = 5e-4


class Row(Protocol):
    @property
    def top_ids(self) -> Sequence[int]: ...

    @property
    def top(self) -> Sequence[float]: ...

    @property
    def rank(self) -> int | None: ...


def check(
    model: PreTrainedModel, prompt: Sequence[int], rows: Sequence[Row], chosen: Sequence[float], most: int
) -> None:
    """`rows` are of all tokens of `prompt` but the first, whose log probabilities are `chosen`, with `most`
    alternatives; ranks and alternatives may differ among tokens that are equally likely but for rounding."""
    expected = logits(model, list(prompt))[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])
    torch.testing.assert_close(torch.tensor(chosen), own[:, 0], atol=NEAR, rtol=0)
    lowest, highest = (expected > own + NEAR).sum(-1) + 1, (expected > own - NEAR).sum(-1) + 1
    ranks = torch.tensor([row.rank or 0 for row in rows], dtype=torch.int64)
    assert bool(((lowest <= ranks) & (ranks <= highest)).all()), ranks
    top_ids = torch.tensor([list(row.top_ids) for row in rows], dtype=torch.int64).reshape(len(rows), most)
    top = torch.tensor([list(row.top) for row in rows]).reshape(len(rows), most)
    torch.testing.assert_close(top, expected.topk(most).values, atol=NEAR, rtol=0)
    torch.testing.assert_close(top, expected.gather(1, top_ids), atol=NEAR, rtol=0)
