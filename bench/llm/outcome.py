"""What came of a workload: which tokens came when, and what that says about a system."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pliant.bench.llm.workload import Workload
from pliant.errors import PliantError

Floats = NDArray[np.float64]


class MissingTokensError(PliantError):
    """A system that did less work than it was given, or more."""


class _Event(NamedTuple):
    at_s: float
    request: int
    tokens: int


class Recorder:
    """Notes when tokens come. Any thread may note; the clock starts when it is made.

    A system that hands out an answer as a whole notes it once, when its last token is there.
    """

    def __init__(self, threads: int) -> None:
        self._events: list[_Event] = []
        self._start = time.perf_counter()
        self.threads = threads
        """That drive the model."""
        self.passes = 0
        """Iterations of the model, for systems that count them."""

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def wait_until(self, at_s: float) -> None:
        """Sleep until that many seconds after the start."""
        time.sleep(max(0.0, at_s - self.now()))

    def note(self, request: int, tokens: int) -> None:
        """`tokens` more of a request are there now."""
        self._events.append(_Event(self.now(), request, tokens))

    def note_all(self, counts: Iterable[tuple[int, int]]) -> None:
        """The same for the tokens of several requests that came at once: (request, tokens)."""
        now = self.now()
        self._events.extend(_Event(now, request, tokens) for request, tokens in counts)

    def outcome(self, workload: Workload) -> Outcome:
        """Raises MissingTokensError unless every request has its tokens, no more and no fewer."""
        events = sorted(self._events)
        got = np.zeros(len(workload), dtype=np.int64)
        for event in events:
            got[event.request] += event.tokens
        if wrong := [index for index, request in enumerate(workload) if got[index] != request.tokens]:
            index = wrong[0]
            raise MissingTokensError(
                f"{len(wrong)} of {len(workload)} requests got another number of tokens than they asked for: request "
                f"{index} got {got[index]}, not {workload[index].tokens}"
            )
        arrivals = np.array([request.at_s for request in workload])
        first, last = np.full(len(workload), np.inf), np.zeros(len(workload))
        for at_s, request, _ in events:
            first[request] = min(first[request], at_s)
            last[request] = at_s
        return Outcome(arrivals, first, last, events, self.threads, self.passes)


@dataclass(frozen=True)
class Outcome:
    """Arrival, first and last token of each request, in seconds from the start, and all tokens in order of time."""

    arrivals: Floats
    first: Floats
    last: Floats
    events: list[_Event]
    threads: int
    passes: int

    @property
    def total_s(self) -> float:
        """From the first arrival to the last token: the paper's total latency."""
        return float(self.last.max() - self.arrivals.min())

    @property
    def latencies(self) -> Floats:
        """Seconds from arrival to the last token, by request."""
        return self.last - self.arrivals

    @property
    def to_first_token(self) -> Floats:
        """Seconds from arrival to the first token, by request."""
        return self.first - self.arrivals

    @property
    def overlap(self) -> float:
        """How many requests are under way on average, over how many there are (Fig. 5)."""
        return float(self.latencies.mean()) / self.total_s

    @cached_property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(event.tokens for event in self.events)

    def progress(self) -> tuple[Floats, Floats]:
        """Seconds, and how many tokens there were by then (Fig. 7)."""
        seconds = np.array([event.at_s for event in self.events])
        return seconds, np.cumsum([float(event.tokens) for event in self.events])

    def gaps(self, request: int, start_s: float, stop_s: float) -> Floats:
        """Seconds between the consecutive tokens of a request, those gaps that end between two times."""
        seconds = np.array([event.at_s for event in self.events if event.request == request])
        ends = seconds[1:]
        gaps: Floats = np.diff(seconds)[(ends >= start_s) & (ends <= stop_s)]
        return gaps
