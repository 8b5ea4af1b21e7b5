"""The gateway's side of the planner's cascades: how far each is, and what serves."""

from __future__ import annotations

from typing import Protocol

from pliant.deployments.cascade.messages import CascadeEntry
from pliant.deployments.serving.catalog.board_follower import BoardFollower
from pliant.deployments.serving.messages import BoardNews


class Planner(Protocol):
    """Calls to the planner. Any may raise anything: it may be gone."""

    async def cascade_news(self, follower: str, seen: tuple[str, int], wait: bool) -> BoardNews[CascadeEntry]: ...


class CascadeFollower(BoardFollower[CascadeEntry]):
    """Keeps `known`, the cascades by name, in step with the planner while `run` runs."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner.cascade_news, "cascades")

    def known_as(self, name: str) -> CascadeEntry | None:
        """What the planner last said of the cascade `name`, if it has said anything."""
        return self.known.get(name)
