"""What replicas that cannot answer yet are doing, as they say it, and how long starts take."""

from __future__ import annotations

import time
from collections.abc import Callable

from pliant.deployments.serving.messages import Step

_GONE_S = 12.0
"""A replica says every five seconds that it still starts; one that does not has ended.

That it failed is remembered until another one of its service says something: Serve may have given the service up."""


_SETTLED_S = 12.0
"""A start of which the planner heard this early is not measured: it may have begun before the planner did, and in a new
application all services load at once, and some train their models first."""
_ASSUMED_S = 30.0
"""What a start is taken to last before one was measured."""
_LEAST_S = 1.0
"""That a start is said to take still, when it has taken longer than others did."""
_LATEST = 0.5
"""Weight of the latest start."""


class StartingReplicas:
    """Of all services, on `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._made = clock()
        self._heard: dict[tuple[str, str], tuple[float, Step]] = {}
        self._began: dict[tuple[str, str], float] = {}
        """When each replica that starts was first heard of."""
        self._seconds: dict[str, float] = {}
        """By service."""

    def hear(self, service: str, replica: str, step: Step | None) -> None:
        """What `replica` does now; None: it can answer."""
        self._heard = {
            other: heard for other, heard in self._heard.items() if other[0] != service or not heard[1].failed
        }
        now = self._clock()
        if step:
            self._heard[service, replica] = now, step
            self._began.setdefault((service, replica), now)
        elif self._heard.pop((service, replica), None):
            self._measure(service, self._began[service, replica], now)
        self._forget()

    def seconds(self, service: str) -> float:
        """What a start of the service takes, from the replica's first word until it can answer."""
        return self._seconds.get(service, _ASSUMED_S)

    def measured(self, service: str) -> bool:
        """Whether `seconds` is more than an assumption."""
        return service in self._seconds

    def within_s(self, service: str) -> float:
        """What the first of its replicas that start now still takes; a whole start, where none has said a word yet."""
        began = [at for (name, _), at in self._began.items() if name == service]
        passed_s = self._clock() - min(began) if began else 0.0
        return max(_LEAST_S, self.seconds(service) - passed_s)

    def now(self) -> dict[str, dict[str, Step]]:
        """By service and replica."""
        self._forget()
        found: dict[str, dict[str, Step]] = {}
        for (service, replica), (_, step) in self._heard.items():
            found.setdefault(service, {})[replica] = step
        return found

    def _forget(self) -> None:
        """Those that have ended."""
        since = self._clock() - _GONE_S
        self._heard = {replica: heard for replica, heard in self._heard.items() if heard[0] >= since or heard[1].failed}
        self._began = {replica: began for replica, began in self._began.items() if replica in self._heard}

    def _measure(self, service: str, began: float, now: float) -> None:
        if began - self._made < _SETTLED_S:
            return
        took, before = now - began, self._seconds.get(service)
        self._seconds[service] = took if before is None else before + _LATEST * (took - before)
