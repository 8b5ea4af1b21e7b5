"""How long a pass over a language model's weights may take, and which prompts go first in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

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
