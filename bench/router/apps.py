"""Bare Ray Serve, and our gateway and router, each in front of the same model that does nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from pliant.bench.loaded import Loaded
from pliant.config.encoder import EncoderConfig
from pliant.deployments.app import assemble
from pliant.deployments.encoder.engine import Runtimes
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.kinds import parse
from pliant.models import sources

_MOST_ONGOING = 1024
_api = FastAPI()


class NoopRuntime:
    """Answers at once, with the same logits for every text."""

    backend = "none"
    dynamic = True

    def __init__(self, max_length: int, labels: int) -> None:
        self.max_length = max_length
        self._logits = np.zeros(labels, dtype="<f4")

    def __call__(self, ids: np.ndarray | Sequence[int], types: object = None) -> np.ndarray:
        return self._logits


class NoopReplica(EncoderReplica):
    """Our replica, around a model that does nothing."""

    def runtimes(self, config: EncoderConfig) -> Runtimes:
        labels = len(sources.describe(sources.fetch(config.model)).labels)
        return Loaded(config, lambda max_length: NoopRuntime(max_length, labels))


class NoopModel:
    """The same for bare Serve."""

    def __init__(self, labels: int) -> None:
        self._scores = [1 / labels] * labels

    async def infer(self, text: str) -> list[float]:
        return self._scores


@serve.ingress(_api)
class BareGateway:
    """The least that reads our requests and gives answers of the same shape.

    `same_loop` runs the handle's router in the ingress's own event loop, as our gateway does, not in a thread.
    """

    async def __init__(self, model: DeploymentHandle[Any], labels: list[str], same_loop: bool) -> None:  # type: ignore[misc]
        if same_loop:
            model._init(_run_router_in_separate_loop=False)  # type: ignore[no-untyped-call]
        self._model = model
        self._labels = labels

    @_api.post("/models/{name}")
    async def classify(self, request: Request, name: str) -> list[list[dict[str, Any]]]:
        call = await request.json()
        scores = await self._model.infer.remote(call["inputs"])
        return [[{"label": label, "score": score} for label, score in zip(self._labels, scores, strict=True)]]


def bare(model: str, replicas: int, cpus: float, *, same_loop: bool) -> Application:
    """Bare Ray Serve: an ingress, `replicas` children and Serve's default router."""
    labels = list(sources.describe(sources.fetch(model)).labels)
    children = _deployment(NoopModel, name="model", num_replicas=replicas, cpus=cpus).bind(len(labels))
    return _deployment(BareGateway, name="gateway", cpus=cpus).bind(children, labels, same_loop)


def ours(model: str, replicas: int, cpus: float, service: str, gateways: int = 1) -> Application:
    """Our gateways and router in front of `replicas` of a no-op model, which is called `service`."""
    config = parse(
        {
            "gateway": {"cpus": cpus, "replicas": gateways},
            "services": {
                service: {"kind": "encoder", "model": model, "lengths": [512], "replicas": replicas, "cpus": cpus}
            },
        }
    )
    return assemble(config, {service: NoopReplica})


def traced(application: Application, collector: str) -> Application:
    """`application`, one of ours, whose gateway and replicas send their spans to `collector`."""
    services: Mapping[str, Application] = list(application._bound_deployment.init_args)[2]
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector}
    for each in (*services.values(), application):
        bound = each._bound_deployment
        options = {**(bound.ray_actor_options or {}), "runtime_env": {"env_vars": environment}}
        each._bound_deployment = bound.options(ray_actor_options=options)
    return application


def _deployment(target: type, cpus: float, **options: Any) -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(  # type: ignore[assignment]
        target, max_ongoing_requests=_MOST_ONGOING, ray_actor_options={"num_cpus": cpus}, **options
    )
    return deployment
