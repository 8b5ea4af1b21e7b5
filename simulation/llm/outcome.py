"""What is asked of a simulated replica, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pliant.simulation.arrivals import Floats


class Request(NamedTuple):
    """When it arrives, in seconds from the start, its tokens, and which adapter it is for."""

    at_s: float
    prompt: int
    output: int
    adapter: int


class Outcome:
    """When each request got its first and last token, and how long iterations took."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.tokens = [0] * len(requests)
        """Of each answer, as of when the request last stopped running."""
        self.answered = 0
        self.squashed = 0
        self.seconds = 0.0
        """When the last token came."""
        self.link_busy_s = 0.0
        self._first = np.full(len(requests), np.nan)
        self._last = np.full(len(requests), np.nan)
        self._steps: list[tuple[float, int]] = []

    def first_token(self, key: int, now: float) -> None:
        """The first token after an admission; that of a squashed request came before."""
        if np.isnan(self._first[key]):
            self._first[key] = now

    def ended(self, key: int, now: float) -> None:
        """The last token; raises ValueError if there was one already."""
        if not np.isnan(self._last[key]):
            raise ValueError(f"request {key} is answered twice")
        self._last[key] = now
        self.answered += 1

    def step(self, seconds: float, decoding: int) -> None:
        """An iteration, and how many requests waited for it to give their next token."""
        self._steps.append((seconds, decoding))

    @property
    def to_first_token(self) -> Floats:
        """Seconds from arrival, by request."""
        return self._first - self._arrivals

    @property
    def latencies(self) -> Floats:
        """Seconds from arrival to the last token, by request."""
        return self._last - self._arrivals

    def between_tokens(self, quantile: float) -> float:
        """Of the seconds between two tokens of a request, over all tokens."""
        seconds, numbers = np.array(self._steps).T
        order = np.argsort(seconds)
        upto = np.cumsum(numbers[order])
        return float(seconds[order][np.searchsorted(upto, quantile * upto[-1])])

    @property
    def _arrivals(self) -> Floats:
        return np.array([request.at_s for request in self.requests])
