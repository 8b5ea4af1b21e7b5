"""The gateway's side of the planner's cascades: how far each is, and what serves."""

from __future__ import annotations

from functools import partial

from pliant.deployments.cascade.messages import CascadeEntry
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.kind import Ask


class CascadeFollower(CatalogFollower[CascadeEntry]):
    """Keeps `known`, the cascades by name, in step with the planner while `run` runs."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(partial(ask, "news"), "cascades")

    def known_as(self, name: str) -> CascadeEntry | None:
        """What the planner last said of the cascade `name`, if it has said anything."""
        return self.known.get(name)
