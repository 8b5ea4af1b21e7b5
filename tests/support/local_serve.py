"""What Ray Serve does for a gateway, a planner and replicas, in one process and without Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from ray.exceptions import ActorDiedError
from support.rooms import roomy

from pliant.config.cluster import ServingConfig
from pliant.deployments.http.application import application
from pliant.deployments.serving.gateway import Gateway
from pliant.deployments.serving.kind import Kind
from pliant.deployments.serving.parcels import Parcel
from pliant.deployments.serving.planner import Planner
from pliant.deployments.serving.table import feed

PlainGateway: Any = Gateway.__mro__[1]
"""Without what Serve wraps around an ingress."""


class Handle:
    """Of a deployment: calls go to the replica that the parcel names, or to the only one. What travels is pickled."""

    def __init__(self, replicas: Mapping[str, Any]) -> None:
        self._replicas = replicas

    def _init(self, _run_router_in_separate_loop: bool) -> None:
        assert not _run_router_in_separate_loop

    def options(self, stream: bool) -> Handle:
        assert stream
        return self

    def __getattr__(self, method: str) -> _Method:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self._replicas, method)


class _Method:
    def __init__(self, replicas: Mapping[str, Any], name: str) -> None:
        self._replicas = replicas
        self._name = name

    def remote(self, *args: Any) -> Any:
        called = next(iter(self._replicas), "") if not isinstance(args[0], Parcel) else args[0].replica
        if called not in self._replicas:
            return asyncio.ensure_future(_dead())
        answer = getattr(self._replicas[called], self._name)(*pickle.loads(pickle.dumps(args)))
        return _Stream(answer) if hasattr(answer, "__aiter__") else asyncio.ensure_future(answer)


class _Stream:
    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._items

    def cancel(self) -> None:
        self._closing = asyncio.ensure_future(self._items.aclose())


async def _dead() -> Any:
    raise ActorDiedError


class LocalCluster:
    """Replicas by service and name, a planner and a gateway. `kinds` are all that there are."""

    def __init__(self, config: ServingConfig, kinds: Mapping[str, Kind[Any]]) -> None:
        self.replicas: dict[str, dict[str, Any]] = {}
        """That live."""
        for service, each in config.services.items():
            if (sizes := each.replica_range()) and (made := kinds[each.kind].replica()):
                self.replicas[service] = {f"{service}-{index}": made(service, each) for index in range(sizes.min)}
        self._config = replace(config, state=config.state or f"memory://{uuid4().hex}")
        self._kinds = kinds

    async def gateway(self) -> FastAPI:
        """Its HTTP application, once it has heard of all replicas."""
        handles = {service: Handle(replicas) for service, replicas in self.replicas.items()}
        planner = Handle({"planner": Planner(self._config, self._kinds, handles, roomy)})  # type: ignore[arg-type]
        gateway = PlainGateway.__new__(PlainGateway)
        await gateway.__init__(self._config, self._kinds, handles, planner, application)
        await self.report()
        app: FastAPI = gateway.__serve_build_asgi_app__()
        return app

    async def report(self) -> None:
        """The controller spreads what each replica says of itself."""
        for service, replicas in self.replicas.items():
            feed(service).sync({name: await replica.record_routing_stats() for name, replica in replicas.items()})
