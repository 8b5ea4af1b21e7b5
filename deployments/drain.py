"""Give away what a node serves before it goes: Ray is warned, Serve starts replicas elsewhere, these end their work."""

from __future__ import annotations

import time

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]

from pliant.deployments.nodes import replicas
from pliant.deployments.ray_client import in_ray
from pliant.errors import PliantError

_EVERY_S = 0.5
_REACHED_WITHIN_S = 80.0
"""Beside the time that replicas have: for Ray to be reached, and to answer. A busy machine takes 15 s to import it."""


def announce(address: str, node: str, within_s: float) -> None:
    """Tell the Ray at `address` that the node of this id goes away in `within_s`, as `ray drain-node` does in a process
    of its own, which a busy machine takes long to start.

    Raises PliantError if Ray refuses.
    """
    ends_ms = time.time_ns() // 1_000_000 + 1000 * max(1, int(within_s))
    accepted, why = GcsClient(address=address).drain_node(node, DRAIN_NODE_REASON_PREEMPTION, "pliant drain", ends_ms)
    if not accepted:
        raise PliantError(f"Ray does not drain {node}: {why}")


def drain(within_s: float) -> int:
    """Drain the node on which this runs; how many replicas are left on it after `within_s` at the latest.

    Raises PliantError if no Ray runs here, or its head does not answer: nothing may have been given away then.
    """
    try:
        return in_ray(_drain, within_s, within_s=_REACHED_WITHIN_S + within_s)
    except PliantError as error:
        fix = "see whether `ray status` answers, and export RAY_AUTH_MODE=token if Ray asks for one"
        raise PliantError(f"this machine is not drained: {error}; {fix}") from None


def await_empty(node: str, within_s: float) -> int:
    """Wait for the replicas on the node of this id to end; how many are left. Needs a connection with Ray."""
    end = time.monotonic() + within_s
    while (left := list(replicas().values()).count(node)) and time.monotonic() < end:
        time.sleep(_EVERY_S)
    return left


def _drain(within_s: float) -> int:
    end = time.monotonic() + within_s
    here = ray.get_runtime_context()
    node = here.get_node_id()
    announce(here.gcs_address, node, within_s)
    return await_empty(node, end - time.monotonic())
