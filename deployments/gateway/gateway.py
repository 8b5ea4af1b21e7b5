"""The Serve ingress: binds the HTTP application to Ray's handles, metrics and environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from fastapi import FastAPI
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from pliant import models
from pliant.config import EncoderConfig, ServingConfig
from pliant.deployments.encoder.engine import Answer, Query, Refusal
from pliant.deployments.encoder.routing_table import shared
from pliant.deployments.gateway.classifier import Classifier, NotDeployedError, ReplicaLostError
from pliant.deployments.gateway.http import application
from pliant.deployments.gateway.status import exposition
from pliant.deployments.metrics import EncoderMetrics
from pliant.errors import ConfigError

Handle = DeploymentHandle[Any]


@serve.ingress()
class Gateway:
    """Stateless: validates, tokenizes, dispatches. `handles` are the services' deployments, by name."""

    async def __init__(self, config: ServingConfig, handles: Mapping[str, Handle]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        self._tables = {name: shared(name, service.slo_ms / 1e3) for name, service in config.services.items()}
        self._classifiers = {
            name: await self._classifier(name, service, handles[name]) for name, service in config.services.items()
        }

    async def _classifier(self, name: str, service: EncoderConfig, handle: Handle) -> Classifier:
        folder = await asyncio.to_thread(models.fetch, service.model)
        info = models.describe(folder)
        return Classifier(name, service, folder, info, self._tables[name], _caller(handle), _Recorder(name))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return application(
            self._config.gateway,
            self._classifiers,
            self._stats,
            lambda: exposition(self._stats()),
            _api_keys(self._config.gateway.api_keys_env),
        )

    def _stats(self) -> dict[str, Any]:
        return {"services": {name: {"replicas": table.replicas()} for name, table in self._tables.items()}}


def _caller(handle: Handle) -> Callable[[Query], Awaitable[Answer | Refusal]]:
    # The router runs in this loop, not in a thread of its own, so that the table needs no lock and a call no hand-over.
    handle._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
    infer = handle.infer

    async def call(query: Query) -> Answer | Refusal:
        response = infer.remote(query)
        try:
            reply: Answer | Refusal = await response
            return reply
        except asyncio.CancelledError as error:
            response.cancel()  # type: ignore[no-untyped-call]
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            raise ReplicaLostError from error  # not the client left, but the replica
        except DeploymentUnavailableError as error:
            raise NotDeployedError from error
        except (RayActorError, TaskCancelledError, AioRpcError) as error:
            raise ReplicaLostError from error

    return call


def _api_keys(variable: str | None) -> list[str]:
    if variable is None:
        return []
    keys = [key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()]
    if not keys:
        raise ConfigError([f"gateway.api_keys_env: got {variable}; the gateway's environment has no keys in it"])
    return keys


class _Recorder:
    def __init__(self, service: str) -> None:
        self._metrics = EncoderMetrics(service)

    def answered(self, seconds: float, runtime: int, tokens: int, in_time: bool) -> None:
        tags = {"runtime": str(runtime)}
        self._metrics.requests.inc(tags={"status": "200"})
        self._metrics.latency.observe(seconds, tags=tags)
        self._metrics.tokens.inc(tokens, tags=tags)
        if runtime > tokens:
            self._metrics.padding.inc(runtime - tokens, tags=tags)
        if not in_time:
            self._metrics.slo_violations.inc()

    def failed(self, status: int) -> None:
        self._metrics.requests.inc(tags={"status": str(status)})
        if status == 429:
            self._metrics.shed.inc()

    def retried(self, reason: Literal["lost", "length", "busy", "none"]) -> None:
        self._metrics.retries.inc(tags={"reason": reason})
