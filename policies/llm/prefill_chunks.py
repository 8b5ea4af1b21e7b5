"""How much of which prompt is computed in the next iteration, so that live answers are not held up for long.

Flover computes every new request's prompt outside the loop, in one piece and beside it (§V-B). On one device a prompt
takes its time from the live requests wherever it runs, and a long one would stall them; so it is cut into chunks. For a
chunk the live requests' next token waits, no longer than a stated bound, as the rate at which prompts are computed is
measured; but a chunk has 16 tokens at least, however long they take. Which prompt is next is `passes.turn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pliant.policies.llm.passes import ALONE_S, LEAST_SHARE, Due, pass_limit_s
from pliant.policies.llm.recent_ratio import RecentRatio

CHUNK_MULTIPLE = 16
"""Tokens of a chunk are a multiple of this, and at least this many: fewer would not use a matrix unit."""
MOST_TOKENS = 2048
"""In one iteration, even when nothing waits for it: what buffers must hold."""
_FIRST_TOKENS = 256
"""In the first iteration, of which nobody knows how long it will take."""
_ASSUMED_TOKENS_PER_S = 1e3
"""Of prompts, before any was computed."""
_DECAY = 0.8
_SPEED_DECAY = 0.95
_PROMPTS_SHARE = 0.1
"""At least, of an iteration's time that is put down to its prompts, when the decode step seems to explain all of it."""


class PrefillBudget:
    """The prompt tokens that an iteration may compute while others wait no longer than `stall_s` seconds for it.

    Part of a chunk's time does not depend on its length, so that the rate rises with the chunks; they grow until one
    takes about `stall_s`.
    """

    def __init__(self, stall_s: float) -> None:
        if not stall_s > 0:
            raise ValueError(f"stall_s must be above 0, got {stall_s}")
        self._stall_s = stall_s
        self._rate = RecentRatio(_DECAY)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that are computed in a second; 0 as long as none were."""
        return self._rate.value

    def observe(self, tokens: int, seconds: float, decode_s: float) -> None:
        """An iteration with so many prompt tokens took `seconds`; its decode step, by itself, takes `decode_s`."""
        self._rate.add(tokens, max(seconds - decode_s, seconds * _PROMPTS_SHARE))

    def tokens(self, live: bool, stall_s: float | None = None) -> int:
        """For the next iteration, at most; `live` tells whether answers wait for it, as long as `stall_s` if given."""
        stall_s = stall_s or self._stall_s
        if not (live or self.tokens_per_s):
            return _FIRST_TOKENS
        within = int(min((stall_s if live else max(ALONE_S, stall_s)) * self.tokens_per_s, MOST_TOKENS))
        return max(CHUNK_MULTIPLE, within - within % CHUNK_MULTIPLE)


class Speeds:
    """How fast an executor is of late, as its iterations tell; nothing is known at first.

    For `stall_s` see `PrefillBudget`.
    """

    def __init__(self, stall_s: float) -> None:
        self._budget = PrefillBudget(stall_s)
        self._step_s = RecentRatio(_SPEED_DECAY)
        self._tokens_per_s = RecentRatio(_SPEED_DECAY)
        self.tokens = 0
        """Of answers, in all iterations."""

    def observe(self, prompt_tokens: int, decoding: bool, tokens: int, seconds: float) -> None:
        """An iteration with so many prompt tokens, which gave so many `tokens`, took `seconds`.

        `decoding` tells whether live requests got tokens, beside those whose prompts ended in it.
        """
        if prompt_tokens:
            self._budget.observe(prompt_tokens, seconds, self.step_s if decoding else 0.0)
        else:
            self._step_s.add(seconds, 1)
        self._tokens_per_s.add(tokens, seconds)
        self.tokens += tokens

    def prompt_tokens(self, live: bool, now: float, due: Due | None = None) -> int:
        """How many the next iteration may compute at most; `live` tells whether answers wait for it, and `due` when the
        first of these is to have its next token, where there is an objective for that."""
        if due is None or not live:
            return self._budget.tokens(live)
        spare_s = pass_limit_s([due], now) - self.step_s
        return self._budget.tokens(live, max(spare_s, self.step_s * LEAST_SHARE))

    @property
    def step_s(self) -> float:
        """Seconds of a decode step without prompts; 0 as long as there was none, as in all of these."""
        return self._step_s.value

    @property
    def prompt_tokens_per_s(self) -> float:
        return self._budget.tokens_per_s

    @property
    def tokens_per_s(self) -> float:
        """Of answers."""
        return self._tokens_per_s.value


@dataclass(frozen=True)
class Measured:
    """What it takes to bring things back, by what was seen of late."""

    prompt_tokens_per_s: Callable[[], float]
    """0 as long as it is not known."""
    adapter_s: Callable[[int], float]

    def prompt_s(self, tokens: int, before: int) -> float:
        return tokens / (self.prompt_tokens_per_s() or _ASSUMED_TOKENS_PER_S)

    def load_s(self, bytes: int) -> float:
        return self.adapter_s(bytes)


def chunks(prompts: Iterable[int], budget: int) -> list[int]:
    """The tokens that each prompt gets of `budget`, in order; none for those behind where it ends.

    `prompts` are the tokens that each still needs, at least 1. All but the last that gets some get all they need.
    """
    granted = []
    for needed in prompts:
        if not budget:
            break
        granted.append(min(needed, budget))
        budget -= granted[-1]
    return granted
