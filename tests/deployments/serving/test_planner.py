"""The planner by itself: what it passes on between gateways."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from support.echo.kind import ECHO

from pliant.config.cluster import Reader
from pliant.deployments.kinds import KINDS, loaded
from pliant.deployments.serving.planner import Planner

pytestmark = pytest.mark.virtual_time


async def test_gateways_hear_of_each_other_until_one_stops_asking() -> None:
    listed = (*KINDS, ECHO)
    config = Reader(kind for kind, _ in listed).parse({"services": {"echo": {"kind": "echo"}}})
    planner = Planner(config, loaded(listed), {"echo": SimpleNamespace(_init=lambda **_: None)})  # type: ignore[dict-item]

    async def heard(gateway: str) -> set[str]:
        _, guidance = await planner.exchange(gateway, "", {})
        return set(guidance["echo"].gateways)

    assert await heard("a") == {"a"}
    assert await heard("b") == {"a", "b"}
    for _ in range(10):
        await asyncio.sleep(1.0)
        left = await heard("b")
    assert left == {"b"}
