"""What gateways, replicas and the planner send each other about services, and about what is registered by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.message import message


@message
@dataclass(slots=True)
class News:
    """What one gateway saw since its last report to the planner."""

    arrived: Counter[int] = field(default_factory=Counter)
    """Texts and prompts by length in tokens; images as 1."""
    seconds: Counter[int] = field(default_factory=Counter)
    """How many of them arrived in each second since 1970."""
    answered: int = 0
    near_slo: int = 0
    """Of the answered, those that took 95% of their SLO or more."""
    above_half: int = 0
    """Of the answered, those that took half of their SLO or more."""
    shed: int = 0
    """Refused because they would have missed their SLO."""
    late: int = 0
    """Of the answered, those that missed it."""
    tokens: int = 0
    """Of the answered: what a language model wrote."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """How many of its requests ended how, ever."""
    asked: Counter[str] = field(default_factory=Counter)
    """Of other services: how often they were asked for it; they count that as theirs, too."""
    sure: Counter[int] = field(default_factory=Counter)
    """Of a cascade: texts that its first level has read, by how sure it was (`resemblance.degree`)."""
    drifts: int = 0
    """Of a cascade: how often a level began to send on another share of texts than in the profile."""
    gateway_busy: float = 0.0
    """How busy the gateway is with all services (see `busyness`)."""


STARTING = "starting"
"""What a replica does that has nothing more to say of it."""


@message
class Step(NamedTuple):
    """What a replica that starts is doing."""

    text: str
    done: float
    """The share of it that is done."""
    failed: bool = False
    """It is over, and `text` is why."""

    def __str__(self) -> str:
        return f"{self.text}, {self.done:.0%}" if self.done else self.text


@message
@dataclass(frozen=True, slots=True)
class Guidance:
    """What gateways should know of a service now."""

    starting: Mapping[str, Step] = field(default_factory=dict)
    """Replicas that cannot answer yet."""

    moving: frozenset[str] = frozenset()
    """Replicas that switch: send them nothing."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """Of replicas that switched lately; newer than what Ray Serve has spread yet."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """For people and Prometheus."""
    gateways: frozenset[str] = frozenset()
    """Those that send to the service's replicas."""
    requests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By gateway: how many of its requests ended how, ever."""
    starts_within_s: float = 0.0
    """Seconds that the first replica still takes which starts now, by what starts took; 0: that is not known."""
    epoch: int = 0
    """Of the planner that says so: of two, the newer has the greater. 0: it is of a version that has none."""


class OfService(Protocol):
    """What belongs to one service."""

    @property
    def service(self) -> str: ...


Entry = TypeVar("Entry", bound=OfService)
"""What is registered in a catalog."""


@message
class Rejected(NamedTuple):
    """Why an entry is not loaded or unloaded."""

    outcome: Outcome
    reason: str
    param: str | None = None
    """What is wrong of the call."""
    fault: Fault | None = None


@message
class Manager(NamedTuple):
    """Who changes what is registered."""

    tenant: str = ""
    manages_all: bool = True
    """Whether also what others loaded, and what lies in folders."""
    services: tuple[str, ...] | None = None
    """Those of which it may change entries; None: all."""

    def owns(self, owner: str) -> bool:
        """Whether it may unload or replace what `owner` loaded, or nobody did if that is empty."""
        return self.manages_all or self.tenant == owner

    def may_use(self, service: str) -> bool:
        return self.services is None or service in self.services


OPERATOR = Manager()
"""Whoever runs the cluster."""


@message
class CatalogNews(NamedTuple, Generic[Entry]):
    """What became of entries since a gateway last heard."""

    life: str
    """Names the planner's process; versions count from 0 in each."""
    version: int
    changes: Mapping[str, Entry | None]
    """By name; None for those that are gone."""
    whole: bool
    """Whether all that is not among `changes` is gone."""
    problems: tuple[str, ...]
    """Of entries that should be there and are not."""
