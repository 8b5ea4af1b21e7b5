"""How busy a gateway is, which decides how many there are."""

from __future__ import annotations

import time
from collections.abc import Callable


class Busyness:
    """Of this process: the share of a processor's time that it takes, or of its places that are taken, whichever is
    more. It may be more than 1, as texts are tokenized and images decoded in threads."""

    def __init__(
        self,
        clock: Callable[[], float] = lambda: time.monotonic(),
        computed: Callable[[], float] = lambda: time.process_time(),
    ) -> None:
        self._clock = clock
        self._computed = computed
        self._since = clock(), computed()
        self._occupied = 0.0

    def occupy(self, share: float) -> None:
        """So much of the gateway's places is taken now."""
        self._occupied = share

    def take(self) -> float:
        """Since it was last asked."""
        (began, computed), self._since = self._since, (self._clock(), self._computed())
        passed_s = self._since[0] - began
        return max(self._occupied, (self._since[1] - computed) / passed_s if passed_s > 0 else 0.0)
