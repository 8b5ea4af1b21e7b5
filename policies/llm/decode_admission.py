"""Whether a language model's replica takes one more request, or had better refuse it at once.

A request waits in a bounded queue until a slot is free, and then for its prompt. When its first token must come within
some time, the wait is predicted from what is there: live answers free their slots in the order of the tokens they still
may get, those that wait ahead take these slots in turn, and prompts are computed one after another. Answers usually end
before their maximum; how much earlier is learned from those that ended. Flover (§V-A) lets requests wait without end,
and so does Chameleon, where an adapter may have to be loaded meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from pliant.policies.llm.recent_ratio import RecentRatio

_DECAY = 0.98
_ASSUMED_TOKENS = 64
"""Weight of the assumption that answers have their maximal length, before some have ended."""


_UNSURE = 0.1
"""By how much, as a share of it, a predicted wait for others may be too short: under overload all that are let in wait
for as long as they may, and would be late by as much."""


class BusyError(Exception):
    """The request is refused now, and may be sent again."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s
        """Seconds after which it has a chance, if nothing else comes in."""

    def __str__(self) -> str:
        return f"{self.reason}; retry after {self.retry_after_s:.1f} s"


class QueueFullError(BusyError):
    """As many requests wait as may."""


class LateError(BusyError):
    """The first token would come, or already comes, later than it is wanted."""


class Waiting(NamedTuple):
    """A request without a slot."""

    prompt: int
    """Tokens to compute before its first one."""
    answer: int
    """Tokens that it may get."""


class Load(NamedTuple):
    """What a replica has to do."""

    free: int
    """Slots."""
    live: Sequence[int]
    """For each request with a slot: tokens that it may still get."""
    prompt: int
    """Prompt tokens of these that are still to be computed."""
    waiting: Sequence[Waiting]
    """Those ahead of a new request, in their order; the free slots go to them first."""
    behind: int = 0
    """Requests that wait too, and that it will pass."""
    ready_s: float = 0.0
    """Seconds until the weights that it needs are there."""


class DecodeAdmission:
    """Admits to a queue of at most `queue` requests, beside those for whom slots are free."""

    def __init__(self, queue: int) -> None:
        if queue < 0:
            raise ValueError(f"queue must be at least 0, got {queue}")
        self._queue = queue
        self._ratio = RecentRatio(_DECAY, _ASSUMED_TOKENS, _ASSUMED_TOKENS)

    @property
    def ratio(self) -> float:
        """Of an answer's tokens to the most that it might have had, as learned from answers that ended; 0 to 1."""
        return self._ratio.value

    def ended(self, tokens: int, most: int) -> None:
        """An answer ended with `tokens` of the `most` that it might have had."""
        self._ratio.add(tokens, most)

    def admit(self, load: Load, prompt: int, within_s: float | None, step_s: float, prompt_tokens_per_s: float) -> None:
        """Return if a request with so many prompt tokens may join the queue; raises QueueFullError or LateError.

        `within_s` is the time in which its first token must come, None for any. `step_s` is how long a decode step
        takes, `prompt_tokens_per_s` how fast prompts are computed; 0 where it is not known, and then not counted.
        """
        waiting = len(load.waiting) + load.behind
        if waiting >= self._queue + load.free:
            reason = f"{waiting} requests wait already, of at most {self._queue}"
            raise QueueFullError(reason, self.next_turn_s(load, step_s, prompt_tokens_per_s))
        if within_s is None:
            return
        predicted_s = first_token_s(load, prompt, self.ratio, step_s, prompt_tokens_per_s)
        own_s = prompt / prompt_tokens_per_s if prompt_tokens_per_s else 0.0
        late_s = predicted_s + _UNSURE * (predicted_s - own_s) - within_s
        if late_s > 0:
            reason = f"the first token would come after {predicted_s:.3f} s, and is wanted within {within_s:.3f} s"
            raise LateError(reason, late_s)

    def next_turn_s(self, load: Load, step_s: float, prompt_tokens_per_s: float) -> float:
        """Seconds until the next request of the queue leaves it, as predicted."""
        return first_token_s(load._replace(waiting=(), ready_s=0.0), 0, self.ratio, step_s, prompt_tokens_per_s)


def first_token_s(load: Load, prompt: int, ratio: float, step_s: float, prompt_tokens_per_s: float) -> float:
    """Seconds until the first token of a request with `prompt` tokens that joins the queue of `load` now.

    Answers get `ratio` of the tokens they may. Where `step_s` or `prompt_tokens_per_s` is 0 that part is not counted.
    More load never makes it less.
    """
    ends = [0.0] * load.free + [tokens * ratio for tokens in load.live] or [0.0]
    heapq.heapify(ends)
    for ahead in load.waiting:
        heapq.heapreplace(ends, ends[0] + ahead.answer * ratio)
    prompts = load.prompt + prompt + sum(ahead.prompt for ahead in load.waiting)
    return max(ends[0] * step_s, load.ready_s) + (prompts / prompt_tokens_per_s if prompt_tokens_per_s else 0.0)
