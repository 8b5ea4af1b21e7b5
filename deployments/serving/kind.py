"""What a kind of service is: all in which its services differ from others, for Ray Serve, the gateway and the planner.

A kind is a folder of `deployments` whose `kind.py` has such an object, and a line in `kinds.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args

from fastapi import APIRouter
from prometheus_client.core import Metric

from pliant.config.base import ServiceConfig
from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.catalog.follower import CatalogFollower
from pliant.deployments.serving.courier import Calls, Courier
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.least_held import LeastHeld
from pliant.deployments.serving.messages import Guidance, News
from pliant.deployments.serving.outcome import Recorder
from pliant.deployments.serving.panels import Panel, Readings
from pliant.deployments.serving.services import Answers, Endpoint, Service, Services
from pliant.deployments.serving.table import Chooser, ReplicaTable
from pliant.deployments.serving.valuer import Valuer

C = TypeVar("C", bound=ServiceConfig)

Fetch = Callable[[Callable[..., Path]], Awaitable[Path]]
"""Calls a function, such as `sources.fetch`, with a service's model and progress, in a thread."""


class Ask(Protocol):
    """Calls a method of a kind's `Part` in the planner.

    May raise anything: the planner may be gone. ReplicaLostError: it died, or another one took its place, meanwhile.
    """

    def __call__(self, method: str, *args: Any) -> Awaitable[Any]: ...


@dataclass(frozen=True)
class Opening(Generic[C]):
    """What a gateway, or the planner, gives a kind that opens a service."""

    name: str
    config: C
    gateway: GatewayConfig
    fetch: Fetch
    table: ReplicaTable[Any, Any]
    """Of its replicas; empty for a service that has none of its own."""
    calls: Calls | None
    """Of its replicas; None for a service that has none of its own."""
    outcomes: Counter[str]
    """How many requests ended how."""
    tally: Tally
    """Of which the planner hears."""
    follower: CatalogFollower[Any] | None
    """The kind's."""
    parts: Mapping[str, Service]
    """The services that it is made of, by name."""

    def caller(self, recorder: Recorder) -> Caller[Any, Any, Any]:
        """Has the service's replicas answer whole, not piece by piece."""
        assert self.calls
        return Caller(self.table, recorder, Courier(self.table.gateway, self.calls))


@dataclass(frozen=True)
class Planning:
    """What the planner gives a kind."""

    config: ServingConfig
    handles: Mapping[str, Any]
    """Of deployments, by service."""
    tables: Mapping[str, ReplicaTable[Any, Any]]
    """Of their replicas."""
    changed: Callable[[], None]
    """To be called when gateways should hear something new."""
    open: Callable[[str], Awaitable[Any]]
    """The endpoint of another service, as a gateway has it, by name."""
    epoch: int
    """The planner's, for what replicas are to obey it in."""
    first_to_stop: Callable[[Sequence[str]], Awaitable[Sequence[str]]]
    """Replicas of one deployment, oldest first, in the order in which Serve stops them."""
    wake: Callable[[str], None] = lambda _service: None
    """To be called, again and again, for a service that is needed now and may sleep."""


class Part:
    """A kind's part of the planner, for all its services. Gateways and replicas may call its public coroutines."""

    async def started(self) -> None:
        """Wait until it can be called."""

    def hear(self, service: str, news: News) -> None:
        """Take in what a gateway saw of `service`."""

    def guidance(self) -> Mapping[str, Guidance]:
        """By service: what gateways should know now."""
        return {}

    def wanted(self) -> Mapping[str, int]:
        """By service: how many replicas there should be, where that is known."""
        return {}

    def ready_for(self, service: str, wanted: int) -> int:
        """How many replicas of `service` there should be now, if `wanted` are in the end: more, while others take over
        what those hold that will be stopped."""
        return wanted

    def check(self) -> None:
        """Raise what keeps it from working."""


class Kind(ABC, Generic[C]):
    """One kind; it has no state."""

    config: type[C]
    """Its keys in cluster.yaml."""
    answers: ClassVar[Answers]
    """What its endpoints take, by which protocols find them."""

    @property
    def name(self) -> str:
        """As cluster.yaml has it."""
        return str(get_args(self.config.model_fields["kind"].annotation)[0])

    @abstractmethod
    async def open(self, opening: Opening[C]) -> Endpoint:
        """What answers for a service, once its model is on this machine."""

    def replica(self) -> type | None:
        """The class of its replicas, which is made with a service's name and config; None: it has none."""
        return None

    def most_ongoing(self, config: C) -> int:
        """Calls that a replica has at a time at most."""
        return 1024

    def chooser(self, config: C) -> Chooser[Any, Any]:
        """By which a gateway chooses replicas of one service."""
        return LeastHeld()

    def follower(self, ask: Ask, config: ServingConfig) -> CatalogFollower[Any] | None:
        """What a gateway follows in the planner, for all services of the kind; None: there is nothing to follow."""
        return None

    def part(self, planning: Planning) -> Part | None:
        """Of the planner."""
        return None

    def valuer(self, config: C) -> Valuer[Any] | None:
        """What says what replicas of one service earn, where all share a budget; None: their number does not change."""
        return None

    def routers(
        self, services: Services, follower: CatalogFollower[Any] | None, gateway: GatewayConfig
    ) -> Sequence[APIRouter]:
        """HTTP routes that only this kind has, whether there are services of it or not."""
        return ()

    def facts(self, service: Service, follower: CatalogFollower[Any] | None) -> Mapping[str, Any]:
        """What /stats says of a service beyond what it says of all."""
        return {}

    def readings(self, report: Mapping[str, Any]) -> Readings:
        """What of a replica's report the console remembers."""
        return Readings()

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        """What the console shows of a service, of what /stats says now and what is remembered."""
        yield from ()

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        """For Prometheus, of what /stats says of the kind's services."""
        yield from ()
