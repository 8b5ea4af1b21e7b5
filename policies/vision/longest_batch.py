"""How long a tenant's batch may take while others may come: a batch that runs is not interrupted.

The larger a batch and the more tokens it gets, the better for those in it; but an image of another tenant that comes
meanwhile waits for all of it. So no batch takes more than a share of the least time that others have lately allowed.
"""

from __future__ import annotations

import math

SHARE = 0.5
_LATELY_S = 60.0


class LongestBatch:
    """Learns from the images that come. `now` and times are in seconds on one clock."""

    def __init__(self) -> None:
        self._allowed: dict[str, tuple[float, float]] = {}
        """By tenant: when its latest image came, and the least that it has allowed of late."""

    def came(self, tenant: str, allowed_s: float, now: float) -> None:
        """An image of `tenant` is to be answered within `allowed_s`."""
        at, least = self._allowed.get(tenant, (-math.inf, math.inf))
        self._allowed = {name: known for name, known in self._allowed.items() if now - known[0] <= _LATELY_S}
        self._allowed[tenant] = (now, min(allowed_s, least) if now - at <= _LATELY_S else allowed_s)

    def seconds(self, tenant: str, now: float) -> float:
        """What a batch of `tenant` may take; infinite where nobody else came lately."""
        others = (
            allowed_s for name, (at, allowed_s) in self._allowed.items() if name != tenant and now - at <= _LATELY_S
        )
        return SHARE * min(others, default=math.inf)
