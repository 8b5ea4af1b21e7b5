"""How a request ends, in words that no protocol and no kind has its own of."""

from __future__ import annotations

from enum import StrEnum

from pliant.errors import PliantError


class Outcome(StrEnum):
    """Every request has exactly one."""

    OK = "ok"
    DEGRADED = "degraded"
    """Answered by less than was to answer it: a cascade did without a level."""
    SHED = "shed"
    """Refused because there is too much to do; it may come back later."""
    TOO_LATE = "too_late"
    """It had no time left for an answer, however little there is to do."""
    REJECTED = "rejected"
    """The client must send something else."""
    UNAVAILABLE = "unavailable"
    """Nobody can answer it now."""
    FAILED = "failed"
    """Something broke."""
    CANCELLED = "cancelled"
    """Nobody waits for the answer any more."""


class RequestError(PliantError):
    """A request that ends without an answer, with a reason for whoever sent it.

    `retry_after_s` says when to come back, if that may help; `fault` names what is wrong of a request that is rejected,
    where protocols tell such faults apart (see `http.statuses`).
    """

    def __init__(self, outcome: Outcome, reason: str, retry_after_s: float | None = None, fault: str = "") -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.fault = fault
