"""What a client is told when its request is not answered, and what may happen to it between gateway and replica."""

from __future__ import annotations

import math

from pliant.errors import PliantError

CANCELLED = 499
"""Instead of a status, of a request that nobody waits for any more."""


class RequestError(PliantError):
    """A request that ends with `status` and a reason, and perhaps a time in seconds after which to come back."""

    def __init__(self, status: int, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}


class LateError(RequestError):
    """There was not enough time for an answer."""


class DownError(RequestError):
    """No replica can take the request just now."""


class ReplicaLostError(Exception):
    """The replica died, or could not be reached, before it answered."""


class ReplicaLeftError(Exception):
    """The request was not sent: the replica has left, or cannot be reached."""


class NotDeployedError(Exception):
    """The service has no replicas at all just now."""
