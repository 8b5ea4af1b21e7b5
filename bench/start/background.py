"""Waits until a cluster that is ready has also done what it does beside answering: compiling, profiling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pliant.bench.load import LoadError, session
from pliant.bench.ray_session import Running
from pliant.bench.start.processes import compiling

CALM_S = 30.0
_WITHIN_S = 1800.0
_EVERY_S = 2.0


class Calm:
    """Whether a cluster has been the same for CALM_S, and nothing compiled."""

    def __init__(self) -> None:
        self._state: object = None
        self._since = 0.0

    def reached(self, now: float, state: object, working: bool) -> bool:
        """`state` is what computes in the replicas `now`, and `working` whether anything compiles."""
        if working or state != self._state:
            self._state, self._since = state, now
        return now - self._since >= CALM_S


def backends(stats: Mapping[str, Any]) -> dict[str, str]:
    """What each replica computes on, of all that /stats says so of, by service and replica."""
    return {replica: report["backend"] for replica, report in _reports(stats) if "backend" in report}


def compiles(stats: Mapping[str, Any]) -> bool:
    """Whether any replica says that it compiles, or waits for it."""
    return any(report.get("compiling") for _, report in _reports(stats))


def _reports(stats: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for service, view in stats["services"].items():
        for replica, report in view["replicas"].items():
            yield f"{service} {replica}", report


async def settle(started: Running, page: str | None) -> None:
    """Wait until it is calm; `page` is the URL of /stats, if there is one. Raises LoadError after half an hour."""
    calm, give_up = Calm(), time.monotonic() + _WITHIN_S
    stats: Mapping[str, Any] = {"services": {}}
    async with session() as http:
        while time.monotonic() < give_up:
            if page:
                async with http.get(page) as response:
                    stats = await response.json()
            working = compiles(stats) or compiling(started.family())
            if calm.reached(time.monotonic(), backends(stats), working):
                return
            await asyncio.sleep(_EVERY_S)
    raise LoadError(f"it was still busy {_WITHIN_S:.0f} s after it was ready. The end of its log:\n{started.tail()}")
