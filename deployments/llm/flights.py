"""The iterations that are under way, oldest first, and whom they serve."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.batch import Served
from pliant.kernels.decoder.decode_step import Launched


class Flight(NamedTuple):
    """An iteration under way."""

    launched: Launched
    at: float
    """When it was launched, in seconds."""
    prompt_tokens: int
    served: Served
    leaving: list[Answer]
    """Those who give back their memory when it is over."""


class Flights(deque[Flight]):
    def last_for(self, answer: Answer) -> Flight | None:
        """The last that computes anything for `answer`."""
        return next((flight for flight in reversed(self) if flight.served.has(answer)), None)

    def drop(self, answers: Collection[Answer]) -> None:
        """What is computed for these means nothing any more."""
        for served in (flight.served for flight in self):
            for computed in (served.firsts, served.rows):
                computed[:] = [None if answer in answers else answer for answer in computed]

    def tokens(self) -> list[Answer]:
        """For each token that is being computed, whose it will be."""
        served = (flight.served for flight in self)
        return [answer for one in served for answer in (*one.firsts, *one.rows) if answer]
