"""What a pass over a language model's weights computes, and what that takes on a machine.

A row is a request that computes some tokens: one of its answer, or a chunk of its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pliant.simulation.llm.hardware import ADAPTER_FLOP, BANDWIDTH_SHARE, FLOPS_SHARE, Costs


class Work(NamedTuple):
    """What a pass, or a part of it, computes and reads; parts add up."""

    rows: int = 0
    """Answers that get their next token."""
    stored: int = 0
    """Tokens whose keys and values are read for these."""
    adapter_bytes: int = 0
    """Of their adapters, each counted once for each row that uses it: so often it is read."""
    prompt: int = 0
    """Tokens of chunks of prompts."""
    pairs: int = 0
    """Of each of these with each token up to it."""
    adapter_tokens: int = 0
    """These times bytes of their adapters."""

    @property
    def tokens(self) -> int:
        """All that go through the model's layers."""
        return self.rows + self.prompt

    def plus(self, other: Work) -> Work:
        """Both together."""
        return Work(*(mine + its for mine, its in zip(self, other, strict=True)))


def token(stored: int, adapter_bytes: int) -> Work:
    """The next token of an answer that has `stored` tokens before it."""
    return Work(rows=1, stored=stored, adapter_bytes=adapter_bytes)


def chunk(tokens: int, before: int, adapter_bytes: int) -> Work:
    """`tokens` of a prompt, behind `before` others."""
    pairs = tokens * before + tokens * (tokens + 1) // 2
    return Work(prompt=tokens, pairs=pairs, adapter_tokens=tokens * adapter_bytes)


@dataclass(frozen=True)
class PassCosts:
    """Seconds of passes on a machine; with `apart`, prompts and answers are two passes, each over all weights."""

    machine: Costs
    apart: bool = False

    def pass_s(self, work: Work) -> float:
        """As long as reading the weights or as the operations, whichever is longer; and what is read for each row."""
        computed_s = self._computed_s(work.tokens, work.pairs)
        if self.apart and work.rows and work.prompt:
            prompts_s = max(self._weights_s, self._computed_s(work.prompt, work.pairs))
            base_s = prompts_s + max(self._weights_s, self._computed_s(work.rows, 0))
        else:
            base_s = max(self._weights_s, computed_s)
        read = work.stored * self.machine.model.token_bytes + work.adapter_bytes
        adapters_s = ADAPTER_FLOP * work.adapter_tokens / self._flops
        return base_s + adapters_s + read / (self.machine.gpu.bandwidth * BANDWIDTH_SHARE)

    def prompt_s(self, tokens: int, before: int) -> float:
        """What a chunk adds to a pass that is large anyway."""
        return self._computed_s(tokens, chunk(tokens, before, 0).pairs)

    def load_s(self, bytes: int) -> float:
        """On an idle link."""
        return self.machine.link.seconds(bytes)

    def _computed_s(self, tokens: int, pairs: int) -> float:
        model = self.machine.model
        return (2 * model.parameters * tokens + 4 * model.layers * model.hidden * pairs) / self._flops

    @cached_property
    def _flops(self) -> float:
        return self.machine.gpu.flops * FLOPS_SHARE

    @cached_property
    def _weights_s(self) -> float:
        return self.machine.model.bytes / (self.machine.gpu.bandwidth * BANDWIDTH_SHARE)
