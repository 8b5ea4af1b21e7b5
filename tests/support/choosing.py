"""What the planner tells of services that choose."""

from __future__ import annotations

import asyncio
from typing import Any

from pliant.deployments.serving.choosing.part import ChoosingPart


async def entry(part: ChoosingPart[Any], state: str) -> Any:
    """What is told of the service `c` once `state` is part of it."""
    seen = "", -1
    async with asyncio.timeout(20):
        while True:
            news = await part.catalog.follow("test", seen, 20)
            seen = news.life, news.version
            found = part.catalog.entries.get("c")
            if found and state in found.state:
                return found
