"""Give away what a node serves before it goes: Ray is warned, Serve starts replicas elsewhere, these end their work."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import ray

from pliant.deployments.nodes import replicas
from pliant.deployments.ray_client import in_ray
from pliant.errors import PliantError

_EVERY_S = 0.5
_HEARD_WITHIN_S = 60.0
"""Ray's command takes a busy machine 15 s to start alone."""
_REACHED_WITHIN_S = 20.0
"""Beside the time that replicas have, and Ray's command: for Ray to be reached, and to answer."""


def announce(address: str, node: str, within_s: float) -> None:
    """Tell the Ray at `address` that the node of this id goes away in `within_s`.

    Raises PliantError if Ray refuses, or does not answer.
    """
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", address, "--node-id", node]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "pliant drain"]
    left = ["--deadline-remaining-seconds", str(max(1, int(within_s)))]
    try:
        done = subprocess.run([*command, *why, *left], capture_output=True, text=True, timeout=_HEARD_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise PliantError(f"`ray drain-node` got no answer within {_HEARD_WITHIN_S:g} s") from None
    if done.returncode:
        raise PliantError(f"Ray does not drain {node}: {done.stderr.strip().splitlines()[-1:]}")


def drain(within_s: float) -> int:
    """Drain the node on which this runs; how many replicas are left on it after `within_s` at the latest.

    Raises PliantError if no Ray runs here, or its head does not answer: nothing may have been given away then.
    """
    try:
        return in_ray(_drain, within_s, within_s=_REACHED_WITHIN_S + _HEARD_WITHIN_S + within_s)
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
