"""Fewer replicas: those that stay take over what those that leave hold, and only then is Serve told (Arlo §4)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

R = TypeVar("R")


class ScaleIn:
    """Of one service. `first_to_stop` puts its replicas, oldest first, into the order in which Serve stops them.

    Serve is told after `within_s` at the latest, whoever holds what then. Times are those of `clock`, in seconds.
    """

    def __init__(
        self,
        first_to_stop: Callable[[Sequence[str]], Awaitable[Sequence[str]]],
        within_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._first_to_stop = first_to_stop
        self._within_s = within_s
        self._clock = clock
        self._wanted: int | None = None
        self._considered: int | None = None
        self._since = 0.0
        self._taken_over = False

    def replicas(self, wanted: int, running: int) -> int:
        """How many Serve should be told to have, of which `wanted` would do and `running` are there."""
        if not 0 < wanted < running:
            self._wanted = None
            return wanted
        if self._wanted is None:
            self._since = self._clock()
        if wanted != self._wanted:
            self._wanted, self._taken_over = wanted, False
        late = self._clock() - self._since >= self._within_s
        return wanted if self._taken_over or late else running

    async def staying(self, present: dict[str, R], running: Sequence[str]) -> dict[str, R]:
        """Those of `present` that Serve will not stop, of all that are `running`, oldest first."""
        self._considered = self._wanted
        if self._wanted is None or self._wanted >= len(running):
            return present
        leaving = (await self._first_to_stop(running))[: len(running) - self._wanted]
        return {replica: each for replica, each in present.items() if replica not in leaving}

    def settled(self) -> None:
        """Those that stayed when it was last asked hold all that is to be held without the others."""
        self._taken_over = self._wanted is not None and self._considered == self._wanted
