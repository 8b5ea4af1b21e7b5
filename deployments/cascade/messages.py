"""What the planner tells gateways about cascades."""

from __future__ import annotations

from typing import NamedTuple

from pliant.deployments.cascade.choice import Choice
from pliant.message import message


@message
class CascadeEntry(NamedTuple):
    """How far a cascade is, and what serves once it is chosen."""

    service: str
    state: str
    """In a few words, for anybody: what is being done, or that nothing can be."""
    choice: Choice | None
    problem: str | None = None
    """For the operator: why nothing is chosen, and what to do."""
    refused: bool = False
    """Nothing will be chosen before the operator does so."""
