"""Prefixes: full pages that are found by what is in them and before them, and how often they are used."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)
"""Names whose requests may share pages."""

WINDOW_S = 300.0
"""A use counts for 1/e of what it did so many seconds ago."""


@dataclass(eq=False)
class Prefix(Generic[R]):
    """A full page that can be found by its content."""

    page: int
    root: R
    parent: Prefix[R] | None
    """The page before it."""
    tokens: tuple[int, ...]
    depth: int
    """Tokens before it."""
    last_used: float
    children: int = 0
    """Pages found behind it."""
    name: bytes = b""
    """What others call it, if anybody has named it."""
    _uses: float = 0.0
    _counted_at: float = 0.0

    def use(self, now: float) -> None:
        """A request has it from now on."""
        self._uses = self.frequency(now) + 1.0
        self._counted_at = self.last_used = now

    def frequency(self, now: float) -> float:
        """Uses, the older ones counted for less."""
        return self._uses * math.exp((self._counted_at - now) / WINDOW_S)


Place = tuple[Prefix[R] | None, R, tuple[int, ...]]
"""What a page is found by: the page before it, if there is one, the root and the tokens in it."""
