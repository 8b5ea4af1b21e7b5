"""Admission: may one more request join a replica and still meet its deadline?

A replica serves its requests one after another. A request that finds work for `wait_s` seconds there, and takes
`service_s` itself, is predicted to be answered after wait_s + service_s. It has `budget_s` seconds left, so its slack
is budget_s - service_s, and `slack_share` (0 to 1) is how much of it the request may spend waiting: with 1 it may come
in at the last moment, with 0 it gets idle replicas only. As load rises, low shares are shed first. Clients set it as
`slack_share`.

Arlo's scheduler (§3.4) never refuses, and turns overload into latency; this rule goes beyond the paper.
"""

from __future__ import annotations

import math

ROUNDING_S = 1e-9
"""By which sums of seconds may be off."""


class DeadlineError(Exception):
    """No replica is predicted to meet the deadline: the request is better refused now than answered late."""

    def __init__(self, retry_after_s: float, service_s: float) -> None:
        super().__init__(retry_after_s, service_s)
        self.retry_after_s = retry_after_s
        """Seconds until the same request could be admitted; infinite when even an idle replica is too slow for it."""
        self.service_s = service_s
        """Seconds that the fastest replica for it needs when idle."""

    def __str__(self) -> str:
        if math.isinf(self.retry_after_s):
            return "the time left is shorter than an idle replica needs"
        return f"every replica is too busy to meet the deadline; retry after {self.retry_after_s:.3f} s"


def retry_after(wait_s: float, service_s: float, idle_s: float, budget_s: float, slack_share: float = 1.0) -> float:
    """Seconds of work that a replica must finish before it may take a request; 0 when it may now, infinite when never.

    It has work for `wait_s`, and the request is expected to take `service_s` there. `idle_s` is the time that was
    measured for it: an idle replica goes by this where it is less, as one that refuses all it gets would never learn
    that what it expects is wrong.
    """
    slack_s = budget_s - service_s
    if slack_s >= -ROUNDING_S:
        missing_s = wait_s - slack_share * max(0.0, slack_s)
    elif idle_s <= budget_s + ROUNDING_S:
        missing_s = wait_s
    else:
        return math.inf
    return missing_s if missing_s > ROUNDING_S else 0.0
