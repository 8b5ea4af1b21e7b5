"""What gateways, the planner and replicas of a classifier service tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NotRequired

import numpy as np

from pliant.deployments.serving import parcels
from pliant.deployments.serving.tenants import Tenant
from pliant.kernels.encoder.texts import Stop
from pliant.message import message
from pliant.policies.encoder.confidence import confidence, softmax

MOST_WAITING = 1024
"""Texts in a replica; of more, those are refused that the tenant sent last which is furthest over its share."""


@message
class Assignment(NamedTuple):
    """What one replica, and no other, is to do: be at home at `max_length`, and hold the runtimes for `lengths`."""

    replica: str
    max_length: int
    epoch: int = 0
    """Of the planner, on the way to the replica. 0: it is of a version that has none."""
    lengths: tuple[int, ...] = ()
    """In rising order; empty: only that of `max_length`."""


@message
class ImportanceRequest(NamedTuple):
    """Which answers are to come with the importance of tokens: those that a cascade is not sure of."""

    temperature: float
    """That logits are calibrated with."""
    below: float
    """The calibrated confidence from which on importance is not wanted."""

    def wants(self, logits: np.ndarray) -> bool:
        return bool(confidence(softmax(logits, self.temperature)) < self.below)


@message
class Query(NamedTuple):
    """One tokenized text on its way to a replica."""

    ids: bytes
    """Token ids, little-endian int32."""
    length: int
    """How many there are."""
    budget_s: float | None
    """Seconds left until the SLO; None once the request must be answered however late (its first replica failed)."""
    slack_share: float
    """Share of its slack that it may spend waiting, 0 to 1."""
    importance_request: ImportanceRequest | None = None
    """For which answers to tell the attention that each token received, too."""
    tenant: Tenant = Tenant()
    types: bytes = b""
    """uint8 per token: of which of two texts it is; empty if of the first, as all are of a single text."""
    stops: tuple[Stop, ...] = ()
    """Exits at which a cascade lets it leave; it hears of all that have read it."""


@message
@dataclass(frozen=True, slots=True)
class Answer:
    logits: bytes
    """float32: one per label, one per token and label of a model that labels tokens, or an embedding."""
    max_length: int
    """Of the runtime that computed them."""
    computed: int
    """Tokens that it computed, padding included."""
    importance: bytes = b""
    """float32, one per token of the query; empty unless the query wants it, and the runtime tells."""
    importance_s: float = 0.0
    """Seconds that importance took beyond the logits."""
    compute_s: float = 0.0
    """Seconds that the logits took."""
    revision: str = ""
    """Of the model that computed them (see `models.revision`)."""
    earlier: bytes = b""
    """float32 [exits, labels]: what the query's stops before the one that answered have said."""
    earlier_s: tuple[float, ...] = ()
    """Of `compute_s`, the seconds up to each of these."""

    @property
    def seconds(self) -> float:
        """That it took in all; of texts computed together, its share."""
        return self.compute_s + self.importance_s


class Report(parcels.Report):
    """What a replica tells gateways and people about itself; it holds seconds of work."""

    max_length: int
    """0 while it switches."""
    home: int
    """The length of the texts that it is to have first: one of `lengths`, or any if its runtime takes all; 0 while it
    switches."""
    lengths: NotRequired[tuple[int, ...]]
    """The max_lengths of its runtimes, in rising order; none while it switches."""
    service_s: float
    """Seconds that a text of max_length takes."""
    curve: tuple[tuple[int, float, float], ...]
    """Points of the `ServiceCurve` of all that it holds; none while it switches."""
    shares: tuple[float, ...]
    """Of the same, if it computes texts together."""
    reads: NotRequired[str]
    """The `models.revision.interface` of its model: only gateways of the same one send it texts."""
    revision: NotRequired[str]
    """Of its model."""
    backend: str
    device: str
    resident: bool
    """Whether its runtime takes all lengths, so that to be at home elsewhere takes no time."""
    room_mb: NotRequired[float | None]
    """What its runtimes may take together, if it may hold several."""
    memory_mb: NotRequired[dict[int, float]]
    """What the runtime for each length took, of those that it has loaded."""
    reason: str
    """Why it computes on a runtime of this kind, for people."""
    compiling: list[int]
    """Lengths that are not compiled yet: what it computes on may change."""
    uncompiled: dict[int, str]
    """Lengths that stay uncompiled, and why."""
    failed: dict[int, str]
    """Lengths that it could not load, and why; it is not asked for them again for some time."""
    waiting: int
    tenants: dict[str, float]
    """Seconds of work that wait, by tenant."""
    margins: dict[str, float]
    """By tenant: by which share more than is predicted its texts wait."""
    passes: int
    """Computations: with batches, fewer than it served."""
    tokens: int
    """Of the texts that it has answered."""
    computed_tokens: int
    """Of the same, padding included."""
    layers: NotRequired[dict[int, int]]
    """Where texts leave early: answers by the layers that were computed for them."""
    p50_ms: float
    p98_ms: float
    """Of the recent requests, in this replica: queue and computation."""


def home(report: Report) -> int:
    """That a replica reports, of whichever version it is."""
    return report.get("home", report["max_length"])


def held_lengths(report: Report) -> tuple[int, ...]:
    """The runtimes that it reports, of whichever version it is."""
    return report.get("lengths", (report["max_length"],) if report["max_length"] else ())
