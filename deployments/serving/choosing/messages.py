"""What the planner tells gateways about services that choose."""

from __future__ import annotations

from typing import Any, NamedTuple

from pliant.message import message


@message
class Chosen(NamedTuple):
    """How far a service is, and what serves once it is chosen."""

    service: str
    state: str
    """In a few words, for anybody: what is being done, or that nothing can be."""
    choice: Any = None
    """What its kind chooses; None before."""
    problem: str | None = None
    """For the operator: why nothing is chosen, and what to do."""
    refused: bool = False
    """Nothing will be chosen before the operator does so."""
