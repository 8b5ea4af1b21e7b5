"""What a step scheduler is told of a request, what it decides, and what it keeps of each request meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from pliant.policies.llm.idle_memory import Root
from pliant.policies.llm.jobs import A, K
from pliant.policies.llm.pages import Copy
from pliant.policies.llm.passes import Due


class Prompt(NamedTuple, Generic[K, A]):
    """A request, as it comes."""

    key: K
    root: Root[A]
    """Its adapter, and whose prefixes it may share."""
    tokens: Sequence[int]
    output: int
    """Tokens that its answer will have, as predicted, at least 1."""
    most: int
    """And at most."""
    adapter_bytes: int
    """0 without an adapter."""
    arrived: float
    tpot_s: float = math.inf
    """Seconds for each token of the answer after the first that are still good enough."""


class Step(NamedTuple, Generic[K, A]):
    """What to do next, in this order, and counted as done but for the rows: `finish` says that these are computed."""

    preempted: list[K]
    """They wait again, and go on later behind the tokens they have."""
    evict: list[A]
    load: list[A]
    """To be loaded from now on; the scheduler waits for `loaded` or `load_failed`."""
    copies: list[Copy]
    rows: Mapping[K, int]
    """Tokens that each request computes, from its first that is not computed on. A request all of whose tokens are
    computed by it gets its next one."""


@dataclass(eq=False)
class Entry(Generic[K, A]):
    """A request that waits or runs."""

    prompt: Prompt[K, A]
    tokens: list[int]
    """Known ones: of the prompt, and of the answer so far."""
    output: int
    """Tokens of the answer, as predicted now."""
    first_at: float | None = None
    """When the first token of the answer came."""
    shared: int = 0
    """Pages that others had before it, when it began to run."""
    prompt_s: float = 0.0
    """Predicted for what was left to compute when it was queued."""

    @property
    def answered(self) -> int:
        """Tokens of its answer that there are."""
        return len(self.tokens) - len(self.prompt.tokens)

    @property
    def left(self) -> int:
        """Tokens of its answer that are still to come, as predicted; at least 1. An answer that is longer than it was
        predicted to be is taken to become a quarter longer than it is."""
        if self.answered < self.output:
            return self.output - self.answered
        return max(1, min(self.answered // 4, self.prompt.most - self.answered))

    @property
    def due(self) -> Due:
        """Of the next token of its answer, once there was one."""
        tpot_s = self.prompt.tpot_s
        return Due(math.inf if self.first_at is None else self.first_at + self.answered * tpot_s, tpot_s)
