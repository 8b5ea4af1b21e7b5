"""What an iteration of a language model is: one pass of rows over all weights, what it computes and what that takes.

A row is a request that computes some tokens: one of its answer, or a chunk of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

MOST_TPOT = 2.0
"""A pass may take so many times what lies between two tokens by the strictest objective, however early tokens were."""
ALONE_S = 0.25
"""And so long where no answer waits for its next token: a request that comes waits for it."""
LEAST_SHARE = 0.25
"""What prompts get of a pass at least, in what the tokens of answers take, however late these are."""
AGEING = 0.25
"""Seconds that a prompt is taken to need less, for each that it has waited."""

Order = Literal["shortest", "fifo"]
"""Of prompts."""


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


class Costs(Protocol):
    """Predicted seconds."""

    def pass_s(self, work: Work) -> float:
        """Of a pass."""
        ...

    def prompt_s(self, tokens: int, before: int) -> float:
        """What `tokens` of a prompt, behind `before` others, add to a pass that is large anyway."""
        ...

    def load_s(self, bytes: int) -> float:
        """To load an adapter."""
        ...


def token(stored: int, adapter_bytes: int) -> Work:
    """The next token of an answer that has `stored` tokens before it."""
    return Work(rows=1, stored=stored, adapter_bytes=adapter_bytes)


def chunk(tokens: int, before: int, adapter_bytes: int) -> Work:
    """`tokens` of a prompt, behind `before` others."""
    pairs = tokens * before + tokens * (tokens + 1) // 2
    return Work(prompt=tokens, pairs=pairs, adapter_tokens=tokens * adapter_bytes)


class Due(NamedTuple):
    """When the next token of an answer is due, and how long the objective gives each."""

    at: float
    tpot_s: float


def pass_limit_s(dues: Iterable[Due], now: float) -> float:
    """What a pass may take so that no token is late, as far as that depends on the prompts in it.

    An answer that is ahead of its objective (time per output token, counted from its first one) can spare what it is
    ahead. One that is late already asks for no more than its pace.
    """
    limit = ALONE_S
    for due in dues:
        limit = min(limit, max(due.at - now, due.tpot_s), MOST_TPOT * due.tpot_s)
    return limit


def turn(prompt_s: float, arrived: float, order: Order = "shortest") -> float:
    """By which prompts go, those with the least first: the seconds that are left of it, less its waiting's, up to a
    term that is alike for all. So it is passed only by those that arrive within its own seconds / `AGEING`."""
    return arrived if order == "fifo" else prompt_s + AGEING * arrived


def longest_chunk(costs: Costs, work: Work, left: int, before: int, adapter_bytes: int, limit_s: float) -> int:
    """The most of `left` prompt tokens that can join a pass of `work` within `limit_s`; 0 if none can."""
    low, high = 0, left
    while low < high:
        middle = (low + high + 1) // 2
        if costs.pass_s(work.plus(chunk(middle, before, adapter_bytes))) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def peak_pages(fixed: int, rows: Sequence[tuple[int, int]], page_tokens: int) -> int:
    """The most pages that will be in use at a time, `fixed` ones and those of rows that end as predicted.

    A row is its pages now and the tokens that it still gets, one an iteration; when it has them, its pages are free.
    In an iteration, rows grow before any ends.
    """
    most = fixed + sum(pages for pages, _ in rows)
    ordered = sorted(rows, key=lambda row: row[1])
    held = sum(pages for pages, _ in ordered)
    for index, (pages, left) in enumerate(ordered):
        most = max(most, fixed + held + (len(ordered) - index) * -(-left // page_tokens))
        held -= pages
    return most
