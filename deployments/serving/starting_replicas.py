"""What replicas that cannot answer yet are doing, as they say it."""

from __future__ import annotations

import time
from collections.abc import Callable

from pliant.deployments.serving.messages import Step

_GONE_S = 12.0
"""A replica says every five seconds that it still starts; one that does not has ended.

That it failed is remembered until another one of its service says something: Serve may have given the service up."""


class StartingReplicas:
    """Of all services, on `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._clock = clock
        self._heard: dict[tuple[str, str], tuple[float, Step]] = {}

    def hear(self, service: str, replica: str, step: Step | None) -> None:
        """What `replica` does now; None: it can answer."""
        self._heard = {
            other: heard for other, heard in self._heard.items() if other[0] != service or not heard[1].failed
        }
        if step:
            self._heard[service, replica] = self._clock(), step
        else:
            self._heard.pop((service, replica), None)

    def now(self) -> dict[str, dict[str, Step]]:
        """By service and replica."""
        since = self._clock() - _GONE_S
        self._heard = {replica: heard for replica, heard in self._heard.items() if heard[0] >= since or heard[1].failed}
        found: dict[str, dict[str, Step]] = {}
        for (service, replica), (_, step) in self._heard.items():
            found.setdefault(service, {})[replica] = step
        return found
