"""What gateways and replicas of a vision service tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pliant.formats.vision_task import TaskRef

Fate = Literal["in_time", "late"]
"""Types 1 and 2 of OTAS §V, of which only the client knows which, and type 3. Type 4 is a Refusal."""
RefusalKind = Literal["shed", "evicted", "expired", "task", "failed"]


class Query(NamedTuple):
    """One image on its way to a replica (the paper's Make_Query)."""

    image: bytes
    """Pixels, uint8 [height, width, channels] of the model's size."""
    task: TaskRef
    budget_s: float
    """Seconds left until the deadline."""
    utility: float
    """What a right answer until then is worth, above 0."""


class Ticket(NamedTuple):
    """A query on its way to the replica that the gateway chose for it."""

    replica: str
    gateway: str
    query: Query


@dataclass(frozen=True, slots=True)
class Answer:
    logits: bytes
    """float32, one per label of the task."""
    gamma: int
    """Tokens added to each layer, or merged if negative."""
    fate: Fate
    rows: int
    """Images that were computed together."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The image was not computed.

    "shed": the queue was full, and others were worth more; "evicted": it waited, but could not be answered in time any
    more; "expired": there was no time left when it came; "task": its task cannot be had; "failed": the computation
    broke down, and another replica may do better.
    """

    kind: RefusalKind
    reason: str
    retry_after_s: float = 0.0
