"""Why a service has too few replicas: no node is large enough for one, or none has room left.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from pliant.deployments.serving.messages import Step

logger = logging.getLogger("pliant")

_LOOK_S = 5.0
_SILENT_S = 30.0
"""A replica that has a place says within these what it does; until then Ray may count what it takes as taken."""


@dataclass(frozen=True)
class Room:
    """What a replica reserves, or a node has."""

    gpus: float
    cpus: float

    def holds(self, other: Room) -> bool:
        return other.gpus <= self.gpus + 1e-6 and other.cpus <= self.cpus + 1e-6

    def __str__(self) -> str:
        amounts = ((self.gpus, "GPU"), (self.cpus, "CPU"))
        return " and ".join(f"{amount:.3g} {what}{'s' * (amount != 1)}" for amount, what in amounts if amount) or "none"


Rooms = tuple[Sequence[Room], Room]
"""What each node has, and what all of them have left together."""


class Places:
    """What keeps replicas from starting, by what they reserve, and by what `look` finds.

    `fewer` gives the services that should have more replicas than something was heard of.
    """

    def __init__(
        self,
        reserved: Mapping[str, Room],
        fewer: Callable[[], set[str]],
        look: Callable[[], Awaitable[Rooms]],
        changed: Callable[[], None],
        clock: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self.lacking: Mapping[str, Step] = {}
        """By service."""
        self._reserved = reserved
        self._fewer = fewer
        self._look = look
        self._changed = changed
        self._clock = clock
        self._since: dict[str, float] = {}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.step()
            except Exception:
                logger.exception("could not ask Ray for its nodes; trying again")

    async def step(self) -> None:
        """Look once, unless all replicas have begun."""
        now = self._clock()
        self._since = {name: self._since.get(name, now) for name in self._fewer()}
        found: dict[str, Step] = {}
        if self._since:
            nodes, left = await self._look()
            for name, since in self._since.items():
                if lacks := _lacks(self._reserved[name], nodes, left, now - since):
                    found[name] = Step(lacks, 0.0)
        if found != self.lacking:
            self.lacking = found
            self._changed()


def _lacks(wanted: Room, nodes: Sequence[Room], left: Room, silent_s: float) -> str | None:
    if not any(node.holds(wanted) for node in nodes):
        largest = max(nodes, key=lambda node: (node.gpus, node.cpus), default=Room(0, 0))
        return f"no node has the {wanted} that a replica reserves, the largest has {largest}; lower it, or add a node"
    if silent_s >= _SILENT_S and not left.holds(wanted):
        return f"a replica reserves {wanted}, and all nodes together have {left} left"
    return None
