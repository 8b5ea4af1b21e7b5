"""How fast an executor is of late, as its iterations tell, and how much of prompts one may therefore compute."""

from __future__ import annotations

from pliant.policies.llm.prefill_chunks import PrefillBudget
from pliant.policies.llm.recent_ratio import RecentRatio

_DECAY = 0.95


class Speeds:
    """Learned from iterations; nothing is known at first. For `stall_s` see `PrefillBudget`."""

    def __init__(self, stall_s: float) -> None:
        self._budget = PrefillBudget(stall_s)
        self._step_s = RecentRatio(_DECAY)
        self._tokens_per_s = RecentRatio(_DECAY)
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

    def prompt_tokens(self, live: bool) -> int:
        """How many the next iteration may compute at most; `live` tells whether answers wait for it."""
        return self._budget.tokens(live)

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
