"""The keys of `budget` in cluster.yaml, and who splits it."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from pliant.config.base import Strict

POLICIES = ("joint", "independent", "greedy")


def made(name: str) -> Any:
    """One of the class that `my_package:Policy` names; this imports its module. Raises ValueError where that fails."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # whatever somebody else's module raises
        raise ValueError(f"must be one of {', '.join(POLICIES)}, or my_package:Policy; {_said(error)}") from None
    if not callable(getattr(found, "decide", None)):
        raise ValueError("must name a class with a method `decide`, as pliant.policies.cluster.control:Policy has it")
    try:
        return found()
    except Exception as error:  # whatever somebody else's class raises
        raise ValueError(f"cannot be made without arguments; {_said(error)}") from None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _known(name: str) -> str:
    if name not in POLICIES:
        made(name)
    return name


class NodesConfig(Strict):
    """So many nodes that are alike."""

    count: Annotated[int, Field(ge=1)] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    cpus: Annotated[float, Field(gt=0)]


class BudgetConfig(Strict):
    """What all services share: the planner gives each its replicas between min and max so that together they earn the
    most."""

    nodes: Annotated[tuple[NodesConfig, ...], Field(min_length=1)] | None = None
    """What the cluster may grow to; None: the nodes that Ray has at the time."""
    reserve: Annotated[int, Field(ge=0)] = 0
    """Whole GPUs that stay free."""
    policy: Annotated[str, AfterValidator(_known)] = "joint"
    """Who decides: `joint`, all services together; `greedy`, replicas go where the next one earns most; `independent`,
    each service by its own load; or a class of one's own, `my_package:Policy`."""
