"""Resource scaling: how many replicas a service needs, by tracking its tail latency (Arlo §4).

The 98th percentile of recent latencies is held between 50% and 95% of the SLO. Above, replicas are added; below, for a
quiet period on end, some are removed. Callers count requests rather than ship latencies: the percentile is at or above
a limit exactly when at least 2% of the requests are. A request that was refused because it would have missed its
deadline counts as one that came near the SLO.

Beyond the paper:

- A step is 5% of the pool, at least one replica: large pools grow as fast as small ones. In a surge it is the share of
  requests that came near the SLO, so that a pool which answers none in time doubles.
- A new replica takes time to start, and the load that called for it lasts until then. Nothing more is added until all
  that was asked for runs and a fresh window has been observed, or a minute has passed.
- Removing replicas must not bring back what adding them cured. For ten minutes the load under which a replica was last
  too busy is remembered, in answers per second, and replicas are kept while fewer would come within 10% of it. Then it
  is forgotten, because that load may have been of longer texts or on a slower replica.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

HIGH = 0.95
LOW = 0.5
"""Shares of the SLO: requests whose latency is at least this are counted as `near_slo` and `above_half`."""

_TAIL = 0.02
_STEP = 0.05
_WINDOW_S = 10.0
_LEAST_REQUESTS = 50
_START_LIMIT_S = 60.0
_REMEMBERED_S = 600.0
_SPARE = 0.1


class _Report(NamedTuple):
    now: float
    answered: int
    near_slo: int
    above_half: int
    shed: int


class TargetTracking:
    """The number of replicas, between `least` and `most`, that keeps the tail latency below the SLO (Arlo §4).

    `observe` what happened, then ask for the number `desired`; `now` is in seconds on one clock that does not run
    backwards. `quiet_s` is how long the tail must have been low, and nothing changed, before replicas are removed.
    With `least` equal to `most` the number is fixed. Raises ValueError for arguments out of range.
    """

    def __init__(self, least: int, most: int, quiet_s: float = 60.0) -> None:
        if not (1 <= least <= most and quiet_s > 0):
            raise ValueError(f"needs 1 <= least <= most and a positive quiet_s, got {least}, {most} and {quiet_s}")
        self._least = least
        self._most = most
        self._quiet_s = quiet_s
        self._target = least
        self._inherited = True
        """Until the first change: what runs may have been called for by a predecessor that died."""
        self._since = math.inf
        """What was reported up to then tells of another number of replicas; infinite before the first question."""
        self._starting: float | None = None
        """When replicas were added that have not all started."""
        self._added = -math.inf
        self._too_busy = math.inf
        """Answers per second and replica when replicas were last added."""
        self._reports: deque[_Report] = deque()
        """Oldest first, as far back as they may still count."""

    def observe(self, now: float, answered: int, near_slo: int, above_half: int, shed: int) -> None:
        """Count what happened since the last call.

        `near_slo` and `above_half` of the `answered` requests took at least 95% and 50% of the SLO; `shed` more were
        refused because they would have missed it.
        """
        if not 0 <= near_slo <= above_half <= answered or shed < 0:
            raise ValueError(
                "needs 0 <= near_slo <= above_half <= answered and 0 <= shed, "
                f"got {near_slo}, {above_half}, {answered} and {shed}"
            )
        self._reports.append(_Report(now, answered, near_slo, above_half, shed))
        while self._reports[0].now <= now - max(self._quiet_s, _WINDOW_S):
            self._reports.popleft()

    def desired(self, now: float, running: int) -> int:
        """How many replicas there should be, now that `running` are ready to serve.

        Those found running in the beginning are taken over, as far as `most` allows, however late they are counted.
        """
        self._since = min(self._since, now)
        if self._inherited:
            self._target = max(self._target, min(running, self._most))
        if self._starting is not None and running >= self._target:
            self._starting = None
            self._since = now
        step = math.ceil(_STEP * self._target)
        if slow := self._too_slow(now):
            more = min(self._target + max(step, math.floor(slow * self._target)), self._most)
            if more > self._target and (self._starting is None or now - self._starting >= _START_LIMIT_S):
                self._too_busy = self._answered(now, _WINDOW_S) / max(1, running)
                self._added = self._starting = now
                self._scale(now, more)
        elif self._quiet(now):
            fewer = max(self._target - step, self._least)
            remembered = now - self._added < _REMEMBERED_S
            load = self._answered(now, self._quiet_s) / fewer
            if not (remembered and load > (1 - _SPARE) * self._too_busy):
                self._starting = None
                self._scale(now, fewer)
        return self._target

    def _scale(self, now: float, target: int) -> None:
        if target != self._target:
            self._target = target
            self._inherited = False
            self._since = now

    def _too_slow(self, now: float) -> float:
        """The share of requests that reached the high limit in the last ten seconds, or in the last 50 if longer ago.

        0 if they are not the tail.
        """
        if now - self._since < _WINDOW_S:
            return 0.0
        requests = near = 0
        for report in reversed(self._reports):
            if report.now <= self._since or (report.now <= now - _WINDOW_S and requests >= _LEAST_REQUESTS):
                break
            requests += report.answered + report.shed
            near += report.near_slo + report.shed
        return near / requests if requests >= _LEAST_REQUESTS and near >= _TAIL * requests else 0.0

    def _quiet(self, now: float) -> bool:
        """Whether the tail stayed below the low limit for the whole quiet period, or nothing came at all."""
        if now - self._since < self._quiet_s:
            return False
        reports = self._last(now, self._quiet_s)
        answered = sum(report.answered for report in reports)
        slow = sum(report.above_half for report in reports)
        return not any(report.shed for report in reports) and (not slow or slow < _TAIL * answered)

    def _answered(self, now: float, seconds: float) -> float:
        """Answers per second in the last `seconds`."""
        return sum(report.answered for report in self._last(now, seconds)) / seconds

    def _last(self, now: float, seconds: float) -> list[_Report]:
        return [report for report in self._reports if report.now > now - seconds]
