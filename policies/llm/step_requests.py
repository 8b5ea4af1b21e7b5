"""What a step scheduler is told of a request, and what it decides of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol

from pliant.policies.llm.idle_memory import Root
from pliant.policies.llm.jobs import A, K


class Text(Protocol):
    """The tokens of a request: of its prompt, and then of its answer."""

    def queued(self) -> Sequence[int]:
        """Those that were known when it was queued last. Only read."""
        ...

    def known(self, start: int = 0) -> list[int]:
        """Those from number `start` on that are known by now."""
        ...


class Prompt(NamedTuple, Generic[K, A]):
    """A request, as it comes. Whoever goes on with an answer has tokens of that in its text already."""

    key: K
    text: Text
    root: Root[A]
    """Its adapter, and whose prefixes it may share."""
    length: int
    """Tokens of the prompt."""
    output: int
    """Tokens that its answer will still get, as predicted, at least 1."""
    size: int
    """Tokens of both at the end, at most."""
    arrived: float
    adapter_bytes: int = 0
    work: float = 1.0
    """What a token of it takes, in tokens without an adapter."""
    shares: bool = True
    """Whether it may begin with what was computed for others."""


class Row(NamedTuple, Generic[K]):
    """An answer whose next token takes another page."""

    key: K
    stored: int
    """Tokens whose keys and values are there, or will be by what is under way."""


class Plan(NamedTuple, Generic[K, A]):
    """What to do before the next iteration, in this order, and what it computes; counted as done but for the chunks.

    Every answer whose prompt is computed gets its next token, except those that sit out.
    """

    put_back: list[K]
    """These make way: they wait again, and go on later behind the tokens that they have."""
    evict: list[A]
    load: list[A]
    """To be loaded from now on; the scheduler waits for `loaded` or `load_failed`."""
    admit: list[K]
    """They begin, with pages of others as far as these begin alike."""
    moves: list[tuple[int, int]]
    """What pages hold is moved, (source, target)."""
    chunks: list[tuple[K, int]]
    """Tokens that are computed of prompts, which have pages for them."""
    sit_out: list[K]
    """There is no page for their next token; they keep what they have until there is."""
