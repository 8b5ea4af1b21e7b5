"""The Ray Serve shell of the planner: one replica for all services of the application.

It may die and come back without a request noticing: gateways go on with what they know, and each kind's part goes on
from what replicas report, or from its files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.serve.handle import DeploymentHandle

from pliant.config.base import ModelServiceConfig
from pliant.config.budget import BudgetConfig
from pliant.config.cluster import GATEWAY, ServingConfig
from pliant.deployments.serving import logs
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.gateways import Gateways
from pliant.deployments.serving.kind import Fetch, Kind, Opening, Part, Planning
from pliant.deployments.serving.messages import Guidance, News, Step
from pliant.deployments.serving.places import Places, Room, Rooms
from pliant.deployments.serving.router import ReplicaCalls, table_of
from pliant.deployments.serving.scale_in import foreseen
from pliant.deployments.serving.starting_replicas import StartingReplicas
from pliant.policies.cluster.budget import Nodes

if TYPE_CHECKING:
    from pliant.deployments.serving.joint_budget import JointBudget

logger = logging.getLogger("pliant")

Handle = DeploymentHandle[Any]

_ANSWER_WITHIN_S = 1.0


class Planner:
    """Exchanges news for guidance with gateways, and runs each kind's part.

    When a planner was cut off and another one started, both may run for a while: gateways and replicas obey the one
    with the greater epoch, which is when it started. One that hears of a greater epoch is replaced: nobody obeys it,
    even if the other has ended, or was its predecessor, with another clock.
    """

    def __init__(
        self,
        config: ServingConfig,
        kinds: Mapping[str, Kind[Any]],
        handles: Mapping[str, Handle],
        look: Callable[[], Awaitable[Rooms]] | None = None,
    ) -> None:
        logs.start()
        self._config = config
        self._kinds = {name: kinds[service.kind] for name, service in config.services.items()}
        self._handles = handles
        self._epoch = time.time_ns()
        self._newest = self._epoch
        """That a gateway has heard of."""
        self._changes = 0
        self._change = asyncio.Event()
        self._starting = StartingReplicas()
        self._gateways = Gateways(config.gateway.replicas)
        self._tables = {
            name: table_of(name, self._kinds[name].chooser(config.services[name]), handle)
            for name, handle in handles.items()
        }
        planning = Planning(config, handles, self._tables, self._changed, self._open, self._epoch, foreseen, self._wake)
        used = {kind.name: kind for kind in self._kinds.values()}
        parts = {name: kind.part(planning) for name, kind in used.items()}
        self._parts: dict[str, Part] = {name: part for name, part in parts.items() if part}
        self._budget = self._joint_budget(config.budget) if config.budget else None
        self._sharing = asyncio.create_task(self._budget.run()) if self._budget else None
        self._wanted: Mapping[str, int] = {}
        """Replicas that services should have whose number changes, as Serve last asked."""
        reserved = {name: _room(config.services[name].resources()) for name in handles}
        self._places = Places(reserved, self._fewer, look or _rooms, self._changed)
        self._looking = asyncio.create_task(self._places.run())

    async def exchange(self, gateway: str, seen: str, news: Mapping[str, News]) -> tuple[str, dict[str, Guidance]]:
        """Take the `news` of `gateway` by service; answer as soon as there is something newer than it has `seen`.

        Answers after a second in any case, so that news keep coming. The first element is what the gateway has seen
        then.
        """
        self._newest = max(self._newest, int(seen.partition("-")[0] or 0))
        self._gateways.hear(gateway, news)
        for service, each in news.items():
            if part := self._parts.get(self._kinds[service].name):
                part.hear(service, each)
            if self._budget:
                self._budget.hear(service, each)
        if seen == self._state:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), _ANSWER_WITHIN_S)
        guidance = {name: each for part in self._parts.values() for name, each in part.guidance().items()}
        if self._budget:
            for name in self._handles:
                known = guidance.get(name, Guidance())
                alone = {key: fact for key, fact in known.plan.items() if key != "wanted_replicas"}
                guidance[name] = replace(known, plan={**alone, **self._budget.facts(name)})
        lacking = {name: {"": step} for name, step in self._places.lacking.items()}
        for name, steps in {**lacking, **self._starting.now()}.items():
            guidance[name] = replace(guidance.get(name, Guidance()), starting=steps)
        gateways = self._gateways.now()
        found = {
            name: replace(
                guidance.get(name, Guidance()),
                gateways=gateways,
                requests=self._gateways.requests(name),
                starts_within_s=self._starting.within_s(name),
                epoch=self._epoch,
            )
            for name in self._kinds
        }
        found[GATEWAY] = Guidance(plan=self._gateways.facts(), gateways=gateways, epoch=self._epoch)
        return self._state, found

    async def starting(self, service: str, replica: str, step: Step | None) -> bool:
        """What a replica of `service` does that cannot answer yet; None once it can. Whether a gateway runs."""
        self._starting.hear(service, replica, step)
        self._changed()
        return self._gateways.any_came

    async def ask(self, kind: str, method: str, *args: Any) -> Any:
        """What the public `method` of a kind's part answers, once that has started."""
        part = self._parts[kind]
        await part.started()
        if method.startswith("_"):
            raise ValueError(f"{method} is not public")
        return await getattr(part, method)(*args)

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """How many replicas each service should have, and how many gateways there should be, for
        `deployments/autoscaling.py`."""
        parts = [self._budget.wanted()] if self._budget else [part.wanted() for part in self._parts.values()]
        self._wanted = {name: number for some in parts for name, number in some.items()}
        services = {name: self._ready_for(name, number) for name, number in self._wanted.items()}
        return {**services, **self._gateways.wanted()}

    def _ready_for(self, service: str, wanted: int) -> int:
        part = self._parts.get(self._kinds[service].name)
        return part.ready_for(service, wanted) if part else wanted

    def check_health(self) -> None:
        """Serve replaces a planner of which a part does not work any more."""
        for part in self._parts.values():
            part.check()
        if self._newest > self._epoch:
            raise RuntimeError("gateways have heard a planner with a later clock, and do not obey this one")
        if self._sharing and self._sharing.done():
            raise RuntimeError(f"the budget is not shared out any more: {self._sharing}")

    def _joint_budget(self, budget: BudgetConfig) -> JointBudget:
        from pliant.deployments.serving.joint_budget import JointBudget  # with a solver, which only a budget needs

        valuers = {name: self._kinds[name].valuer(self._config.services[name]) for name in self._handles}
        judged = {name: valuer for name, valuer in valuers.items() if valuer}
        return JointBudget(
            self._config, judged, self._tables, self._starting, partial(_nodes, budget), lambda: self._gateways.count
        )

    def _fewer(self) -> set[str]:
        """Services that should have more replicas than something was heard of."""
        starting = self._starting.now()
        begun = {name: table.reports().keys() | starting.get(name, {}).keys() for name, table in self._tables.items()}
        return {name for name in self._handles if len(begun[name]) < self._wanted.get(name, self._least(name))}

    def _least(self, service: str) -> int:
        size = self._config.services[service].replica_range()
        return size.min if size else 0

    def _wake(self, service: str) -> None:
        if self._budget:
            self._budget.wake(service)

    @property
    def _state(self) -> str:
        return f"{self._epoch}-{self._changes}"

    def _changed(self) -> None:
        self._changes += 1
        self._change.set()
        self._change = asyncio.Event()

    async def _open(self, name: str) -> Any:
        """A service as gateways have it, for profiles."""
        config = self._config.services[name]
        assert isinstance(config, ModelServiceConfig)
        fetch: Fetch = partial(_fetched, config.model)
        return await self._kinds[name].open(
            Opening(
                name,
                config,
                self._config.gateway,
                fetch,
                self._tables[name],
                ReplicaCalls(name, self._handles[name]),
                Counter(),
                Tally(),
                None,
                {},
            )
        )


async def _nodes(budget: BudgetConfig) -> list[Nodes]:
    """What there is to share: as configured, or the nodes that Ray has now, alike ones together."""
    if budget.nodes:
        return [Nodes(each.count, each.gpus, each.cpus) for each in budget.nodes]
    alike = Counter((int(node.get("GPU", 0)), float(node.get("CPU", 0))) for node in await _alive())
    return [Nodes(count, gpus, cpus) for (gpus, cpus), count in alike.items()]


async def _rooms() -> Rooms:
    left = await asyncio.to_thread(ray.available_resources)
    return [_room(node, "GPU", "CPU") for node in await _alive()], _room(left, "GPU", "CPU")


async def _alive() -> list[Mapping[str, float]]:
    """What each node has."""
    return [node["Resources"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]


def _room(resources: Mapping[str, float], gpus: str = "num_gpus", cpus: str = "num_cpus") -> Room:
    return Room(resources.get(gpus, 0.0), resources.get(cpus, 0.0))


async def _fetched(model: str, fetch: Any) -> Path:
    folder: Path = await asyncio.to_thread(fetch, model)
    return folder
