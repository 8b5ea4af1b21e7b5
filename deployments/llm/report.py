"""What an engine tells about itself."""

from __future__ import annotations

from typing import TypedDict


class LlmReport(TypedDict):
    """Counts are of now, speeds of late."""

    max_length: int
    """Tokens that a slot has: a prompt and its answer together."""
    slots: int
    live: int
    """Requests that have a slot."""
    waiting: int
    """Requests that wait for one."""
    live_tokens: int
    """That all of these may come to hold, prompts and answers together."""
    served: int
    """Answers that came to their end."""
    tokens: int
    """Of answers, computed since the start."""
    tokens_per_s: float
    """The same in a second of computing."""
    step_ms: float
    """A decode step without prompts."""
    prompt_tokens_per_s: float
    answer_ratio: float
    """Tokens of answers to the most that they might have had."""
