"""Admission: may one more request join a replica and still meet its deadline?

A replica serves its requests one after another, `service_s` seconds each. A request that finds n of them there is
predicted to wait n * service_s and to finish after (n + 1) * service_s. It has `budget_s` seconds left, so its slack
is budget_s - service_s, and its `utility` (0 to 1) is the share of that slack it may spend waiting: one of utility 1
may come in at the last moment, one of utility 0 gets idle replicas only. As load rises, low utilities are shed first.

Arlo's scheduler (§3.4) never refuses, and turns overload into latency; this rule goes beyond the paper.
"""

from __future__ import annotations

import math

_ROUNDING = 1e-9


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


def requests_within(seconds: float, service_s: float) -> int:
    """How many requests of `service_s` seconds, one after another, end within `seconds` (finite, at least 0)."""
    return int(seconds / service_s + _ROUNDING)


def most_outstanding(service_s: float, budget_s: float, utility: float = 1.0) -> int:
    """The most requests a replica may already hold when one with `budget_s` seconds left joins it; -1 when never."""
    slack_s = budget_s - service_s
    return requests_within(utility * slack_s, service_s) if slack_s >= 0 else -1


def retry_after(outstanding: int, service_s: float, budget_s: float, utility: float = 1.0) -> float:
    """Seconds until a replica with `outstanding` requests, if it gets no more of them, may take this one.

    0 when it may take it now, infinite when it never may. The time is that of the completions still needed, counted as
    if the oldest request had only just begun.
    """
    most = most_outstanding(service_s, budget_s, utility)
    return max(0, outstanding - most) * service_s if most >= 0 else math.inf
