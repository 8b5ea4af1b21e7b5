"""The parts of Ray Serve that we build on, some not public: an upgrade that changes one must fail here first."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
from ray import serve
from ray._common.utils import import_attr
from ray.serve._private import default_impl
from ray.serve._private.common import TimeStampedValue
from ray.serve._private.handle_options import InitHandleOptions
from ray.serve._private.replica import ReplicaActor
from ray.serve._private.router import AsyncioRouter
from ray.serve.config import AutoscalingContext, BackpressureConfig
from ray.serve.context import _set_request_context
from ray.serve.experimental.capacity_queue_router import CapacityQueueRouter
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pliant.config.cluster import AUTOSCALING_POLICY
from pliant.deployments import app, kinds
from pliant.deployments.autoscaling import follow_planner
from pliant.deployments.serving import table
from pliant.deployments.serving.router import ReplicaRouter


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_serve_asks_the_router_for_one_replica_and_catches_nothing_of_ours() -> None:
    source = inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert "._choose_replica_for_request(" in source
    assert "except Exception" not in source
    assert "_choose_replica_for_request" in vars(CapacityQueueRouter), "Serve's own example overrides the same step"


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("initialize_state", ["self", "kwargs"]),
        ("update_replicas", ["self", "replicas"]),
        ("choose_replicas", ["self", "candidate_replicas", "pending_request"]),
        ("_choose_replica_for_request", ["self", "pending_request", "is_retry"]),
        ("on_replica_actor_died", ["self", "replica_id"]),
        ("on_replica_actor_unavailable", ["self", "replica_id"]),
    ],
)
def test_router_hooks(hook: str, expected: list[str]) -> None:
    assert parameters(getattr(RequestRouter, hook)) == expected
    assert hook in vars(ReplicaRouter)


def test_what_the_router_reads() -> None:
    assert "args" in PendingRequest.__dataclass_fields__
    assert "unique_id" in ReplicaID.__dataclass_fields__
    for name in ("replica_id", "routing_stats", "replica_metadata"):
        assert isinstance(inspect.getattr_static(RunningReplica, name), property)


def test_what_replicas_are_asked_beside_what_they_compute() -> None:
    assert parameters(RunningReplica.get_queue_len) == ["self", "deadline_s"]
    assert inspect.iscoroutinefunction(RunningReplica.get_queue_len)
    assert "deadline_s" not in inspect.getsource(RunningReplica.get_queue_len).split('"""')[2], "it is for tests"
    assert "concurrency group" in (inspect.getdoc(ReplicaActor.get_num_ongoing_requests) or "")


def test_a_call_is_logged_as_of_the_request_in_whose_context_it_is_made() -> None:
    assert "request_id" in parameters(_set_request_context)
    assert "request_id=_request_context.request_id" in inspect.getsource(default_impl.get_request_metadata)


def test_the_handle_runs_its_router_in_our_loop() -> None:
    assert "_run_router_in_separate_loop" in InitHandleOptions.__dataclass_fields__
    assert "stream" in parameters(DeploymentHandle.options)
    assert hasattr(DeploymentHandle, "broadcast")


def test_the_ingress_builds_its_application_in_the_replica() -> None:
    assert "__serve_build_asgi_app__" in inspect.getdoc(serve.ingress)  # type: ignore[operator]


def test_a_full_gateway_answers_429() -> None:
    assert BackpressureConfig(status_code=429, retry_after_s=1).status_code == 429


@pytest.mark.parametrize("kind", ["encoder", "llm", "vision"])
def test_the_router_of_every_kind_meets_the_gateway_in_a_module(kind: str) -> None:
    """Serve pickles the class by value, but not the modules that it names."""
    config = kinds.parse({"services": {"s": {"kind": kind, "model": "m", "replicas": 1}}}).services["s"]
    known = kinds.loaded()[kind]
    target = known.replica()
    assert target
    options = app.replicas_of("s", config, known, target)._bound_deployment._deployment_config.request_router_config
    options._serialize_request_router_cls()
    router: Any = options.get_request_router_class()
    assert router.__name__ == ReplicaRouter.__name__
    assert router.initialize_state.__globals__["feed"] is table.feed
    assert options.request_router_kwargs == {"service": "s"}


def test_what_the_autoscaling_policy_reads() -> None:
    assert {"target_num_replicas", "raw_metrics"} <= {*parameters(AutoscalingContext.__init__)}
    assert {"timestamp", "value"} <= {field.name for field in fields(TimeStampedValue)}
    assert import_attr(AUTOSCALING_POLICY) is follow_planner
    assert "contexts" in parameters(follow_planner)
