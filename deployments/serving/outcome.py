"""How a request ends, in words that no protocol and no kind has its own of; and the one place where that is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from pliant.errors import PliantError
from pliant.message import Word


class Outcome(Word):
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

    @classmethod
    def unknown(cls) -> Outcome:
        return cls.UNAVAILABLE


class Fault(Word):
    """What an outcome was due to, where a protocol or a caller tells such faults apart. Each is of one outcome."""

    # rejected
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD = "method"
    SLOW_BODY = "slow_body"
    CONFLICT = "conflict"
    TOO_LARGE = "too_large"
    MEDIA_TYPE = "media_type"
    TOO_LONG = "too_long"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH = "context_length_exceeded"
    ADAPTER_TOO_LARGE = "adapter_too_large"
    UNKNOWN_PARAMETER = "unknown_parameter"
    MISSING_PARAMETER = "missing_required_parameter"
    # shed
    EVICTED = "evicted"
    """It waited, and had to make way for others."""
    QUOTA = "insufficient_quota"
    """The tenant is allowed none."""
    # too late
    SHORT_SLO = "short_slo"
    """The time that the client allows is less than an answer takes."""
    # unavailable
    DOWN = "down"
    """There is no replica, and the caller does not wait for one."""
    TIMED_OUT = "timed_out"
    """No replica answered in all the time that the caller waits."""
    ADAPTER_NOT_LOADABLE = "adapter_not_loadable"


class RequestError(PliantError):
    """A request that ends without an answer, with a reason for whoever sent it.

    `retry_after_s` says when to come back, if that may help; `fault` is narrower than the outcome; `param` names the
    part of the request that is wrong. `http.statuses` says what clients get.
    """

    def __init__(
        self,
        outcome: Outcome,
        reason: str,
        retry_after_s: float | None = None,
        fault: Fault | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.fault = fault
        self.param = param


Trouble = Literal["busy", "down", "late", "failed"]
"""Why a service that was to do a part of the work did not."""
BECAUSE: dict[Trouble, str] = {
    "busy": "is overloaded",
    "down": "is down",
    "late": "did not answer in time",
    "failed": "failed",
}


def trouble_of(error: RequestError) -> Trouble:
    """What a service's `error` means to what is made of it."""
    if error.fault is Fault.DOWN:
        return "down"
    if error.outcome is Outcome.TOO_LATE or error.fault is Fault.TIMED_OUT:
        return "late"
    return "busy" if error.outcome is Outcome.SHED else "failed"


Retry = Literal["lost", "busy", "moved", "stalled"]
"""Why another replica is asked: the last one died or broke down; had no room; held something else; took too long.

To wait for a replica when there is none is no retry.
"""


class Recorder(Protocol):
    """Where a service counts."""

    def ended(self, outcome: Outcome) -> None: ...

    def retried(self, why: Retry) -> None: ...


@dataclass
class Ending:
    """How a request that is answered ends; whoever answers it may say otherwise than well."""

    outcome: Outcome | None = Outcome.OK
    """None: it has not ended, and is counted elsewhere."""


@contextmanager
def counted(recorder: Recorder) -> Iterator[Ending]:
    """Record the one outcome of the request that is answered within."""
    ending = Ending()
    try:
        yield ending
    except RequestError as error:
        recorder.ended(error.outcome)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        recorder.ended(Outcome.CANCELLED)
        raise
    except BaseException:
        recorder.ended(Outcome.FAILED)
        raise
    if ending.outcome:
        recorder.ended(ending.outcome)
