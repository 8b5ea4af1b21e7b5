"""The gateway's side of the planner's choices: how far each service is, and what serves."""

from __future__ import annotations

from functools import partial

from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.kind import Ask


class ChoiceFollower(CatalogFollower[Chosen]):
    """Keeps `known`, the choices by service, in step with the planner while `run` runs; `what` names them in logs."""

    def __init__(self, ask: Ask, what: str) -> None:
        super().__init__(partial(ask, "news"), what)

    def known_as(self, name: str) -> Chosen | None:
        """What the planner last said of the service `name`, if it has said anything."""
        return self.known.get(name)
