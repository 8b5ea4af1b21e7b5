"""A gateway's lines to replicas, see `line`.

A call by Ray's handle takes a gateway and a replica longer than all that pliant does for it. So a replica listens
itself, says where by what Serve passes on of it, and is called there; whoever has no connection yet, or can have none,
calls by the handle.

Plain asyncio, without Ray.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Literal

from pliant.deployments.serving.line import Address, Line, connected
from pliant.deployments.serving.table import feed

_AGAIN_S, _MOST_AGAIN_S = 0.5, 30.0
"""Until the next try to connect, after the first that failed, and at most."""
_FAILED = 3
"""Tries in a row, from which on people hear of it."""

State = Literal["open", "opening", "failed", "none"]
"""None: the replica does not listen."""


class Lines:
    """Those of this process to the replicas of one service. `broke` hears of a replica whose line broke."""

    def __init__(self, broke: Callable[[str], None]) -> None:
        self._broke = broke
        self._lines: dict[str, Line] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._failures: Counter[str] = Counter()
        """Tries to connect in a row that failed."""

    def sync(self, addresses: Mapping[str, Address]) -> None:
        """Keep a line to each of these replicas, and to no others. Calls of others that are under way go on."""
        for replica in self._keeping.keys() - addresses.keys():
            self._keeping.pop(replica).cancel()
            self._failures.pop(replica, None)
        for replica in addresses.keys() - self._keeping.keys():
            # in no request's context, whose end would be the line's
            task = asyncio.get_running_loop().create_task(self._keep(replica, addresses[replica]), context=Context())
            self._keeping[replica] = task

    def to(self, replica: str) -> Line | None:
        """The line to `replica`, if there is one now."""
        line = self._lines.get(replica)
        return line if line and line.open else None

    def state(self, replica: str) -> State:
        """Of the line to `replica`, for people."""
        if self.to(replica):
            return "open"
        if replica not in self._keeping:
            return "none"
        return "failed" if self._failures[replica] >= _FAILED else "opening"

    async def _keep(self, replica: str, address: Address) -> None:
        pause_s = _AGAIN_S
        while True:
            if line := await connected(address):
                self._lines[replica] = line
                self._failures.pop(replica, None)
                pause_s = _AGAIN_S
                try:
                    await asyncio.shield(line.closed)
                finally:
                    del self._lines[replica]
                    line.retire()
                self._broke(replica)
            else:
                self._failures[replica] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(_MOST_AGAIN_S, 2 * pause_s)


_lines: dict[str, Lines] = {}


def lines(service: str) -> Lines:
    """This process's, of `service`."""
    if service not in _lines:
        _lines[service] = Lines(feed(service).suspect)
    return _lines[service]
