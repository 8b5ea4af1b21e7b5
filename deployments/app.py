"""Builds the Serve application that cluster.yaml names: a gateway, and one deployment of replicas for each service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from pliant.config import EncoderConfig, ServingConfig, check_models, parse
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.gateway.gateway import Gateway
from pliant.errors import PliantError

_STATS_PERIOD_S = 1.0
_MOST_OUTSTANDING = 1024
_HEALTH: dict[str, Any] = {
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": 30.0,
}


def build(args: dict[str, Any]) -> Application:
    """The application for cluster.yaml's `args`.

    Raises RayServeException with a line for each problem: of it alone Serve shows the message without a traceback.
    """
    try:
        config = parse(args)
        check_models(config)
    except PliantError as error:
        raise RayServeException(str(error)) from None
    return assemble(config, {name: encoder(name, service) for name, service in config.services.items()})


def assemble(config: ServingConfig, services: Mapping[str, Application]) -> Application:
    """A gateway in front of `services`."""
    gateway = config.gateway
    return _deployment(
        Gateway,
        name="gateway",
        num_replicas=gateway.replicas,
        ray_actor_options={"num_cpus": gateway.cpus},
        max_ongoing_requests=gateway.max_ongoing_requests,
        max_queued_requests=gateway.max_ongoing_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
    ).bind(config, dict(services))


def encoder(name: str, config: EncoderConfig, replica: type[EncoderReplica] = EncoderReplica) -> Application:
    """The replicas of one classifier service; each is a `replica`."""
    router: dict[str, Any] = {
        "request_router_class": "pliant.deployments.router:LengthRouter",
        "request_router_kwargs": {"service": name, "slo_s": config.slo_ms / 1e3},
        "request_routing_stats_period_s": _STATS_PERIOD_S,
    }
    return _deployment(
        replica,
        name=name,
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        max_ongoing_requests=_MOST_OUTSTANDING,
        request_router_config=RequestRouterConfig(**router),
    ).bind(name, config)


def _deployment(target: type, **options: Any) -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(target, **_HEALTH, **options)  # type: ignore[assignment]
    return deployment
