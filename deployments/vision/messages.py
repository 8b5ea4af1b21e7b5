"""What gateways, the planner and replicas of a vision service send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pliant.deployments.serving.tenants import Tenant
from pliant.formats.vision_task import TaskRef
from pliant.message import message

Fate = Literal["in_time", "late"]
"""Types 1 and 2 of OTAS §V, of which only the client knows which, and type 3. Type 4 is a Refusal."""


@message
class Query(NamedTuple):
    """One image on its way to a replica (the paper's Make_Query)."""

    image: bytes
    """Pixels, uint8 [height, width, channels] of the model's size."""
    task: TaskRef
    budget_s: float
    """Seconds left until the deadline."""
    utility: float
    """What a right answer until then is worth, above 0."""
    tenant: Tenant = Tenant()


@message
@dataclass(frozen=True, slots=True)
class Answer:
    logits: bytes
    """float32, one per label of the task."""
    gamma: int
    """Tokens added to each layer, or merged if negative."""
    fate: Fate
    rows: int
    """Images that were computed together."""
    compute_s: float = 0.0
    """Seconds that these took."""


@message
class RegisteredTask(NamedTuple):
    """A task of a vision service that clients may name."""

    service: str
    task: TaskRef
    labels: tuple[str, ...]
    """In the order of the outputs."""
    slo_ms: float
    """Unless the request says otherwise."""
    utility: float
    """The same."""
    created: int
    """When it was registered, in Unix seconds."""
    coming: bool = False
    """Whether replicas are to load it before clients may name it."""
    owner: str = ""
    """The tenant that loaded it; empty of those in folders."""
