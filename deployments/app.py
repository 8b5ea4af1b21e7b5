"""Builds the Serve application that cluster.yaml names: a gateway, a planner, and one deployment for each service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from pliant.config import EncoderConfig, LlmConfig, ReplicaRange, ServingConfig, VisionConfig, check_models, parse
from pliant.deployments.autoscaling import PLANNER, STAY
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.gateway.gateway import Gateway
from pliant.deployments.llm.replica import LlmReplica
from pliant.deployments.planner.planner import Planner
from pliant.deployments.vision.replica import VisionReplica
from pliant.errors import PliantError

_STATS_PERIOD_S = 1.0
_MOST_OUTSTANDING = 1024
_MOST_GATEWAYS = 1024
_PLANNER_CPUS = 0.1
_METRICS_PERIOD_S = 1.0
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
    encoders = {name: encoder(name, service) for name, service in config.encoders.items()}
    llms = {name: llm(name, service) for name, service in config.llms.items()}
    visions = {name: vision(name, service) for name, service in config.visions.items()}
    return assemble(config, encoders | llms | visions)


def assemble(config: ServingConfig, services: Mapping[str, Application]) -> Application:
    """A gateway in front of `services`; a planner for those that are encoders, and for others' adapters and tasks.

    Serve hears from a planner how many replicas there should be only if it scales itself, which costs each process that
    calls it, and Serve's controller, a little all the time.
    """
    gateway = config.gateway
    encoders = {name: service for name, service in services.items() if name in config.encoders}
    scales = not all(service.replicas.fixed for service in config.encoders.values())
    planner = _deployment(
        Planner,
        name=PLANNER,
        ray_actor_options={"num_cpus": _PLANNER_CPUS},
        max_ongoing_requests=_MOST_GATEWAYS,
        **({"autoscaling_config": _between(ReplicaRange(min=1, max=1))} if scales else {}),
    ).bind(config, encoders)
    return _deployment(
        Gateway,
        name="gateway",
        num_replicas=gateway.replicas,
        ray_actor_options={"num_cpus": gateway.cpus},
        max_ongoing_requests=gateway.max_ongoing_requests,
        max_queued_requests=gateway.max_ongoing_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
    ).bind(config, dict(services), planner)


def encoder(name: str, config: EncoderConfig, replica: type[EncoderReplica] = EncoderReplica) -> Application:
    """The replicas of one classifier service; each is a `replica`."""
    return _deployment(
        replica,
        name=name,
        **_size(config.replicas),
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        max_ongoing_requests=_MOST_OUTSTANDING,
        request_router_config=_router(
            "pliant.deployments.encoder.router:LengthRouter", service=name, slo_s=config.slo_ms / 1e3
        ),
    ).bind(name, config)


def llm(name: str, config: LlmConfig) -> Application:
    """The replicas of one language model."""
    return _deployment(
        LlmReplica,
        name=name,
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        max_ongoing_requests=_MOST_OUTSTANDING,
        request_router_config=_router("pliant.deployments.llm.router:LiveTokenRouter", service=name),
    ).bind(name, config)


def vision(name: str, config: VisionConfig) -> Application:
    """The replicas of one vision service."""
    return _deployment(
        VisionReplica,
        name=name,
        num_replicas=config.replicas,
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        max_ongoing_requests=max(_MOST_OUTSTANDING, 3 * config.queue),
        request_router_config=_router("pliant.deployments.vision.router:LeastBusyRouter", service=name),
    ).bind(name, config)


def _router(router: str, **kwargs: Any) -> RequestRouterConfig:
    """`router`, given `kwargs` in each process that calls the deployment."""
    options: dict[str, Any] = {
        "request_router_class": router,
        "request_router_kwargs": kwargs,
        "request_routing_stats_period_s": _STATS_PERIOD_S,
    }
    return RequestRouterConfig(**options)


def _size(replicas: ReplicaRange) -> dict[str, Any]:
    return {"num_replicas": replicas.min} if replicas.fixed else {"autoscaling_config": _between(replicas)}


def _between(replicas: ReplicaRange) -> AutoscalingConfig:
    """Autoscaling without delays of Serve's own: the planner has them."""
    return AutoscalingConfig(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        upscale_delay_s=0,
        downscale_delay_s=0,
        metrics_interval_s=_METRICS_PERIOD_S,
        look_back_period_s=2 * _METRICS_PERIOD_S,
        policy=AutoscalingPolicy(policy_function=STAY),  # type: ignore[no-untyped-call]
    )


def _deployment(target: type, **options: Any) -> serve.Deployment:
    deployment: serve.Deployment = serve.deployment(target, **_HEALTH, **options)  # type: ignore[assignment]
    return deployment
