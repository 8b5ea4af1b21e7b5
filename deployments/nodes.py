"""Looks at every node of a running Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pliant.deployments.ray_client import in_ray

Found = TypeVar("Found")

_REPLICA = "SERVE_REPLICA::"
_HEAD = "node:__internal_head__"
_START_S = 60
"""For a process on a node to start and look."""
_ANSWER_S = 5
_IN_ALL_S = 90


@dataclass(frozen=True)
class Visit(Generic[Found]):
    """What was found on a node."""

    host: str
    found: Found
    guarded: bool
    """Whether its Ray asks for a token."""
    clock_s: float
    """By how much its clock is ahead of this machine's, give or take `clock_within_s`."""
    clock_within_s: float


@dataclass(frozen=True)
class Unreached:
    """A node on which nothing could be looked at."""

    host: str
    reason: str


class _Visitor:
    """A process on the node."""

    def look(self, look: Callable[[], Any]) -> tuple[Any, bool]:
        return look(), is_token_auth_enabled()

    def clock(self) -> float:
        return time.time()


def visit(look: Callable[[], Found]) -> list[Visit[Found] | Unreached]:
    """Call `look`, a function of a module, on each living node of the Ray that $RAY_ADDRESS names or that runs here.

    Raises PliantError if Ray cannot be reached.
    """
    return in_ray(_visits, look, within_s=_IN_ALL_S)


def replicas() -> dict[str, str]:
    """The node of every replica of Serve, of the Ray that this process is part of."""
    return {
        actor["Name"].rpartition("#")[2]: actor["Address"]["NodeID"]
        for actor in actors().values()
        if actor["State"] == "ALIVE" and actor["Name"].startswith(_REPLICA)
    }


def head() -> str:
    """The node that Ray began with, if it is still there."""
    heads = (node["NodeID"] for node in ray.nodes() if _HEAD in node["Resources"])  # type: ignore[no-untyped-call]
    return next(heads, "")


def _visits(look: Callable[[], Any]) -> list[Visit[Any] | Unreached]:
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    visitors = [_visitor(node["NodeID"]) for node in nodes]
    looks = [visitor.look.remote(look) for visitor in visitors]
    ray.wait(looks, num_returns=len(looks), timeout=_START_S)
    return [
        _visited(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})", visitor, found)
        for node, visitor, found in zip(nodes, visitors, looks, strict=True)
    ]


def _visitor(node: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(_Visitor).options(scheduling_strategy=there).remote()


def _visited(host: str, visitor: Any, looked: Any) -> Visit[Any] | Unreached:
    try:
        found, guarded = ray.get(looked, timeout=0)
        asked = time.time()
        clock = ray.get(visitor.clock.remote(), timeout=_ANSWER_S)
        answered = time.time()
    except Exception as error:
        return Unreached(host, (str(error).strip() or repr(error)).splitlines()[-1])
    return Visit(host, found, guarded, clock - (asked + answered) / 2, (answered - asked) / 2)
