"""How long a tenant's batch may take while others may come: a batch that runs is not interrupted.

The larger a batch and the more tokens it gets, the better for those in it; but an image of another tenant that comes
meanwhile waits for all of it. So no batch takes more than a share of the least time that others have lately allowed.
"""

from __future__ import annotations

import math
from collections import deque

SHARE = 0.5
_LATELY_S = 60.0


class LongestBatch:
    """Learns from the images that come. `now` and times are in seconds on one clock."""

    def __init__(self) -> None:
        self._allowed: dict[str, deque[tuple[float, float]]] = {}
        """By tenant: when images came of late that allowed less than all after them, and how much, the oldest first."""

    def came(self, tenant: str, allowed_s: float, now: float) -> None:
        """An image of `tenant` is to be answered within `allowed_s`."""
        self._forget(now)
        images = self._allowed.setdefault(tenant, deque())
        while images and images[-1][1] >= allowed_s:
            images.pop()
        images.append((now, allowed_s))

    def seconds(self, tenant: str, now: float) -> float:
        """What a batch of `tenant` may take; infinite where nobody else came lately."""
        self._forget(now)
        others = (images[0][1] for name, images in self._allowed.items() if name != tenant)
        return SHARE * min(others, default=math.inf)

    def _forget(self, now: float) -> None:
        for images in self._allowed.values():
            while images and now - images[0][0] > _LATELY_S:
                images.popleft()
        self._allowed = {name: images for name, images in self._allowed.items() if images}
