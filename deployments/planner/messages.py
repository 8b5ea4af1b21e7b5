"""What gateways and the planner tell each other about a service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pliant.deployments.encoder.engine import Report


@dataclass(slots=True)
class News:
    """What one gateway saw since it last told the planner."""

    arrived: Counter[int] = field(default_factory=Counter)
    """Texts by length in tokens."""
    answered: int = 0
    near_slo: int = 0
    """Of the answered, those that took 95% of their SLO or more."""
    above_half: int = 0
    """Of the answered, those that took half of their SLO or more."""
    shed: int = 0
    """Refused because they would have missed their SLO."""


@dataclass(frozen=True, slots=True)
class Guidance:
    """What gateways should know of a service now."""

    moving: frozenset[str] = frozenset()
    """Replicas that switch: send them nothing."""
    reports: Mapping[str, Report] = field(default_factory=dict)
    """Of replicas that switched lately; newer than what Ray Serve has spread yet."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """For people and Prometheus."""
