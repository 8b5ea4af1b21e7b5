"""Adapters on their way from the host to a simulated GPU."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from pliant.simulation.llm.hardware import Costs


@dataclass
class Loads:
    """One adapter after the other; `under_way` may be taken from by whoever notices that a load is over."""

    costs: Costs
    free_at: float = 0.0
    busy_s: float = 0.0
    under_way: deque[tuple[float, int]] = field(default_factory=deque)
    """When each load ends, and of which adapter, in order."""

    def load(self, adapter: int, bytes: int, now: float) -> None:
        """Begin as soon as those before it are over."""
        seconds = self.costs.link.seconds(bytes)
        self.busy_s += seconds
        self.free_at = max(self.free_at, now) + seconds
        self.under_way.append((self.free_at, adapter))

    def __contains__(self, adapter: object) -> bool:
        """Whether it is being loaded."""
        return any(adapter == other for _, other in self.under_way)

    @property
    def next_end(self) -> float:
        """When the next load is over; infinite if none is under way."""
        return self.under_way[0][0] if self.under_way else math.inf
