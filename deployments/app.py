"""Builds the Serve application that cluster.yaml names: a gateway, a planner, and one deployment for each service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from pliant.config.base import ReplicaRange, ServiceConfig
from pliant.config.cluster import GATEWAY, PLANNER, PLANNER_CPUS, ServingConfig, check_models
from pliant.deployments import kinds
from pliant.deployments.autoscaling import STAY
from pliant.deployments.http.application import application
from pliant.deployments.http.places import most_at_once
from pliant.deployments.http.statuses import BUSY
from pliant.deployments.own_version import version_of, with_own_version
from pliant.deployments.serving.gateway import Gateway
from pliant.deployments.serving.kind import Kind
from pliant.deployments.serving.listening import listening
from pliant.deployments.serving.planner import Planner
from pliant.errors import PliantError

_STATS_PERIOD_S = 1.0
_MOST_GATEWAYS = 1024
_PLANNER_ANSWERS_WITHIN_S = 2.0
"""Three times in a row, or another one takes its place: that costs no request, and nothing is loaded without one. Less
would have one replaced that only waits for a busy processor; Serve takes two seconds of it to start the next."""
_METRICS_PERIOD_S = 1.0
_STREAMS_END_WITHIN_S = 300.0
"""Of a gateway that goes because fewer are enough."""
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
    return assemble(checked(args))


def checked(args: dict[str, Any], parse: Callable[[dict[str, Any]], ServingConfig] = kinds.parse) -> ServingConfig:
    """What `args` say, as `parse` reads them. Raises what `build` does."""
    try:
        config = parse(args)
        check_models(config)
    except PliantError as error:
        raise RayServeException(str(error)) from None
    return config


def assemble(
    config: ServingConfig,
    replicas: Mapping[str, type] = MappingProxyType({}),
    listed: Iterable[kinds.Listed] = kinds.KINDS,
) -> Application:
    """A gateway in front of the services of `config`, which are of the `listed` kinds, a planner, and their replicas:
    those of the kind, unless there are others of a service in `replicas`.

    Serve hears from a planner how many replicas there should be only if it scales itself, which costs each process that
    calls it, and Serve's controller, a little all the time.
    """
    gateway = config.gateway
    known = kinds.loaded(listed)
    ranges = [service.replica_range() for service in config.services.values()]
    scales = any(sizes and not sizes.fixed for sizes in [*ranges, gateway.replicas])
    services = {
        name: replicas_of(name, service, known[service.kind], target)
        for name, service in config.services.items()
        if (target := replicas.get(name) or known[service.kind].replica())
    }
    planner = _deployment(
        Planner,
        name=PLANNER,
        ray_actor_options={"num_cpus": PLANNER_CPUS},
        max_ongoing_requests=_MOST_GATEWAYS,
        health_check_timeout_s=_PLANNER_ANSWERS_WITHIN_S,
        **({"autoscaling_config": _between(ReplicaRange(min=1, max=1))} if scales else {}),
    ).bind(config, known, services)
    return _deployment(
        Gateway,
        name=GATEWAY,
        **_size(gateway.replicas),
        **({} if gateway.replicas.fixed else {"graceful_shutdown_timeout_s": _STREAMS_END_WITHIN_S}),
        ray_actor_options={"num_cpus": gateway.cpus},
        max_ongoing_requests=most_at_once(gateway),
        max_queued_requests=most_at_once(gateway),
        backpressure_config=BackpressureConfig(status_code=BUSY, retry_after_s=1),
    ).bind(config, known, dict(services), planner, application)


def replicas_of(name: str, config: ServiceConfig, kind: Kind[Any], target: type) -> Application:
    """The replicas of one service; each is a `target`."""
    size = config.replica_range()
    assert size
    most = kind.most_ongoing(config)
    deployment = _deployment(
        listening(target, most),
        name=name,
        **_size(size),
        ray_actor_options=config.resources(),
        max_ongoing_requests=most,
        request_router_config=_router(service=name),
    )
    return with_own_version(deployment, version_of(config, target)).bind(name, config)


def _router(**kwargs: Any) -> RequestRouterConfig:
    """Ours, given `kwargs` in each process that calls the deployment."""
    options: dict[str, Any] = {
        "request_router_class": "pliant.deployments.serving.router:ReplicaRouter",
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
    deployment: serve.Deployment = serve.deployment(target, **{**_HEALTH, **options})  # type: ignore[assignment]
    return deployment
