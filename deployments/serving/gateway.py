"""The Serve ingress: binds the HTTP application to Ray's handles, metrics and environment."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from pliant.config.base import ModelServiceConfig
from pliant.config.cluster import GATEWAY, ServingConfig
from pliant.deployments.serving import logs, tracing
from pliant.deployments.serving.batches.runner import Runner
from pliant.deployments.serving.batches.store import BatchStore
from pliant.deployments.serving.busyness import Busyness
from pliant.deployments.serving.calls import answer
from pliant.deployments.serving.catalog.confinement import public
from pliant.deployments.serving.follower import Follower, Tally
from pliant.deployments.serving.haproxy_counts import HaproxyCounts
from pliant.deployments.serving.history import STEP_S, History
from pliant.deployments.serving.keys import Tenants
from pliant.deployments.serving.kind import Ask, Kind, Opening
from pliant.deployments.serving.lines import lines
from pliant.deployments.serving.messages import Guidance, News
from pliant.deployments.serving.metrics import EdgeMetrics, Refusals, TenantMetrics
from pliant.deployments.serving.router import ReplicaCalls, table_of
from pliant.deployments.serving.services import Replicas, Service, Services
from pliant.deployments.serving.state.storage import storage
from pliant.deployments.serving.status import exposition
from pliant.errors import PliantError
from pliant.haproxy import socket_of

logger = logging.getLogger("pliant")

Handle = DeploymentHandle[Any]

_AGAIN_S = 10.0
"""After a model could not be had."""


@serve.ingress()
class Gateway:
    """Stateless: validates, tokenizes, dispatches. `handles` are the services' deployments, by name, and `application`
    makes the HTTP application of what is served (see `http.application`)."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: ServingConfig,
        kinds: Mapping[str, Kind[Any]],
        handles: Mapping[str, Handle],
        planner: Handle,
        application: Callable[..., FastAPI],
    ) -> None:
        logs.start()
        tracing.start()
        self._application = application
        self._config = config
        self._known = kinds
        self._kinds = {name: kinds[service.kind] for name, service in config.services.items()}
        self._handles = handles
        self._name = uuid.uuid4().hex[:8]
        self._tables = {
            name: table_of(name, kind.chooser(config.services[name]), handles.get(name))
            for name, kind in self._kinds.items()
        }
        self._outcomes: dict[str, Counter[str]] = {name: Counter() for name in config.services}
        self._refusals = Refusals({name: kind.name for name, kind in self._kinds.items()}, self._outcomes)
        self._tallies = {name: Tally(self._outcomes[name]) for name in config.services}
        self._busyness = Busyness()
        calls = _Planner(planner, self._busyness)
        self._follower = Follower(self._name, calls.exchange, self._tables, self._tallies)
        self._gateways = config.gateway.replicas.min
        self._tenants = Tenants(config, TenantMetrics(), gateways=self._count)
        used = {kind.name: kind for kind in self._kinds.values()}
        self._catalogs = {name: kind.follower(self._asking(calls, name), config) for name, kind in used.items()}
        self._services = Services(list(self._described()))
        self._history = History(used)
        self._batches = Runner(BatchStore(storage(config.state)), self._name)
        haproxy = socket_of(ray.get_runtime_context().get_node_id())
        runs = [
            self._remember(),
            *([HaproxyCounts(haproxy, EdgeMetrics()).run()] if haproxy else ()),
            self._batches.run(),
            self._follower.run(),
            *(catalog.run() for catalog in self._catalogs.values() if catalog),
        ]
        self._following = [asyncio.create_task(each) for each in runs]
        self._fetching = ThreadPoolExecutor(len(config.services), thread_name_prefix="fetching")
        self._opening = [asyncio.create_task(self._open(service)) for service in self._services]

    def _asking(self, calls: _Planner, kind: str) -> Ask:
        """Calls the part of `kind` of the planner, for as long as that is the newest."""
        return lambda method, *what: self._follower.while_it_lasts(calls.ask(kind, method, *what))

    def _described(self) -> Iterator[Service]:
        """The services, before any of them can answer."""
        described: dict[str, Service] = {}
        configs = self._config.services
        for name in TopologicalSorter({name: config.parts() for name, config in configs.items()}).static_order():
            config, kind = configs[name], self._kinds[name]
            sizes = config.replica_range()
            described[name] = Service(
                name,
                kind.name,
                kind.answers,
                self._replicas(name, sizes.min) if sizes else None,
                [described[part] for part in config.parts()],
            )
        return (described[name] for name in self._config.services)

    def _replicas(self, name: str, least: int) -> Replicas:
        return Replicas(
            wanted=lambda: int(self._follower.of(name).plan.get("wanted_replicas", least)),
            running=lambda: self._tables[name].running,
            starting=lambda: self._follower.of(name).starting.values(),
            least=least,
        )

    async def _open(self, service: Service) -> None:
        """Give `service` its endpoint once its model is on this machine, however often that has to be tried."""
        kind, config = self._kinds[service.name], self._config.services[service.name]
        handle = self._handles.get(service.name)
        opening = Opening(
            service.name,
            config,
            self._config.gateway,
            partial(self._fetched, service, config),
            self._tables[service.name],
            ReplicaCalls(service.name, handle) if handle else None,
            self._outcomes[service.name],
            self._tallies[service.name],
            self._catalogs[kind.name],
            {part.name: part for part in self._services if part.name in config.parts()},
        )
        while True:
            try:
                service.open(await kind.open(opening))
            except PliantError as error:
                reason = _public(str(error), config)
                logger.warning("%s: %s", service.name, error)
            except Exception as error:  # a broken file of one service must not keep the others from being served
                reason = f"{type(error).__name__}: {error}"
                logger.exception("%s: cannot be opened", service.name)
            else:
                return
            service.opening(f"{reason}; trying again", 0.0)
            await asyncio.sleep(_AGAIN_S)

    async def _fetched(self, service: Service, config: Any, fetch: Callable[..., Path]) -> Path:
        assert isinstance(config, ModelServiceConfig)
        call = partial(fetch, config.model, progress=service.opening)
        return await asyncio.get_running_loop().run_in_executor(self._fetching, call)

    async def _remember(self) -> None:
        while True:
            self._history.record(time.time(), self._stats())
            await asyncio.sleep(STEP_S)

    async def check_health(self) -> None:
        """Serve replaces a gateway that does not listen to the planner any more."""
        for task in self._following:
            if task.done():
                raise RuntimeError(f"the planner is not followed any more: {task}")

    def __serve_build_asgi_app__(self) -> FastAPI:
        gateway = self._config.gateway
        routers = [
            router
            for name, kind in self._known.items()
            for router in kind.routers(self._services, self._catalogs.get(name), gateway)
        ]
        return self._application(
            gateway,
            self._services,
            self._stats,
            lambda: exposition(self._stats(), self._known),
            routers,
            self._tenants,
            self._refusals,
            self._history,
            self._batches,
            self._busyness.occupy,
        )

    def _count(self) -> int:
        """How many gateways there are, as the planner last said."""
        sizes = self._config.gateway.replicas
        if known := self._follower.of(GATEWAY).gateways:
            self._gateways = min(max(len(known), sizes.min), sizes.max)
        return self._gateways

    def _stats(self) -> dict[str, Any]:
        return {
            "gateway": self._name,
            "gateways": {"running": self._count(), **self._follower.of(GATEWAY).plan},
            "planner_reached": self._follower.reached,
            "tenants": self._tenants.facts(),
            "batches": self._batches.facts(),
            "services": {service.name: self._facts(service) for service in self._services},
        }

    def _facts(self, service: Service) -> dict[str, Any]:
        name, kind = service.name, self._kinds[service.name]
        config = self._config.services[name]
        size = config.replica_range()
        return {
            **service.facts(),
            "requests": self._outcomes[name],
            "requests_by_gateway": {**self._follower.of(name).requests, self._name: self._outcomes[name]},
            "plan": self._follower.of(name).plan,
            "gpus": config.resources().get("num_gpus", 0.0),
            "replica_range": [size.min, size.max] if size else None,
            "replicas": {
                replica: {**said, "line": lines(name).state(replica)}
                for replica, said in self._tables[name].replicas().items()
            },
            **kind.facts(service, self._catalogs[kind.name]),
        }


def _public(reason: str, config: Any) -> str:
    """`reason` for clients, without where on this machine the model of `config` lies."""
    return reason.replace(config.model, public(config.model)) if isinstance(config, ModelServiceConfig) else reason


class _Planner:
    """Calls to the planner, that end when whoever waits for them leaves."""

    def __init__(self, handle: Handle, busyness: Busyness) -> None:
        self._handle = handle
        self._busyness = busyness

    async def exchange(self, gateway: str, seen: str, news: Mapping[str, News]) -> tuple[str, Mapping[str, Guidance]]:
        busy = self._busyness.take()
        for each in news.values():
            each.gateway_busy = busy
        answered: tuple[str, Mapping[str, Guidance]] = await answer(self._handle.exchange.remote(gateway, seen, news))
        return answered

    async def ask(self, kind: str, method: str, *args: Any) -> Any:
        """See `Planner.ask`."""
        return await answer(self._handle.ask.remote(kind, method, *args))
