"""Which gateways there are, as the planner hears of them, and how many there should be, by their own load."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from pliant.config.base import ReplicaRange
from pliant.config.cluster import GATEWAY
from pliant.deployments.serving.messages import News
from pliant.policies.cluster.load_tracking import LoadTracking

logger = logging.getLogger("pliant")

BUSY = 0.6
"""The share of a gateway's time that is aimed at: of one processor, or of its places, whichever is more."""
PERIOD_S = 10.0
SETTLED_S = 60.0
"""A planner that starts anew has heard of all gateways by then."""
_GONE_S = 5.0
"""A gateway that has not asked for so long has ended."""


class Gateways:
    """Those that ask for guidance. `clock` gives seconds."""

    def __init__(self, sizes: ReplicaRange, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._sizes = sizes
        self._clock = clock
        self._began = self._decided = clock()
        self._heard: dict[str, float] = {}
        """By gateway: when it last asked."""
        self._requests: dict[str, Mapping[str, Mapping[str, int]]] = {}
        """By gateway and service: how many ended how."""
        self._busy: defaultdict[str, list[float]] = defaultdict(list)
        """By gateway: what it said of its load in this period."""
        self._tracking = LoadTracking(BUSY)
        self._wanted: int | None = None
        self._because = "nothing has called for another number yet"
        self._load = 0.0

    @property
    def any_came(self) -> bool:
        return bool(self._heard)

    def hear(self, gateway: str, news: Mapping[str, News]) -> None:
        """Take in what `gateway` saw, by service."""
        now = self._clock()
        self._heard[gateway] = now
        self._requests[gateway] = {service: each.requests for service, each in news.items()}
        self._busy[gateway].append(max((each.gateway_busy for each in news.values()), default=0.0))
        if now - self._decided >= PERIOD_S:
            self._decided = now
            self._decide(now)

    def now(self) -> frozenset[str]:
        """Those that are not gone."""
        since = self._clock() - _GONE_S
        latest = max(self._heard, key=self._heard.__getitem__)
        self._heard = {name: at for name, at in self._heard.items() if at >= since or name == latest}
        self._requests = {name: self._requests[name] for name in self._heard}
        return frozenset(self._heard)

    def requests(self, service: str) -> dict[str, Mapping[str, int]]:
        """By gateway: how many of the service's ended how."""
        return {name: requests.get(service, {}) for name, requests in self._requests.items()}

    @property
    def count(self) -> int:
        """How many were decided on, or else run."""
        return self._wanted or min(max(len(self._heard), self._sizes.min), self._sizes.max)

    def wanted(self) -> dict[str, int]:
        """How many there should be, by the name of their deployment, once that was decided."""
        return {GATEWAY: self._wanted} if self._wanted else {}

    def facts(self) -> dict[str, Any]:
        """For /stats."""
        return {"wanted": self.count, "wanted_because": self._because, "busy": round(self._load, 3)}

    def _decide(self, now: float) -> None:
        """By the load of this period, all of it on as many as there should be: others start, or end what they have."""
        before, there = self.count, self.now()
        self._load = sum(fmean(self._busy[name]) for name in there if name in self._busy) / before
        self._busy.clear()
        if self._sizes.fixed or now - self._began < SETTLED_S:
            return
        self._wanted = self._tracking.desired(now, self._load, before, self._sizes.min, self._sizes.max)
        if self._wanted != before:
            self._because = f"each of {before} was busy for {self._load:.0%} of its time, and {BUSY:.0%} is aimed at"
            logger.info("gateways %d → %d: %s", before, self._wanted, self._because)
