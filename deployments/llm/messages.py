"""What gateways and replicas of a language model tell each other, beside the pieces of answers."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict

from pliant.deployments.llm.report import AdapterReport, ClassReport, PredictorReport
from pliant.deployments.llm.request import Generation


class Ticket(NamedTuple):
    """A generation on its way to the replica that the gateway chose for it."""

    replica: str
    gateway: str
    generation: Generation

    @property
    def live_tokens(self) -> int:
        """What the request may come to hold in the replica."""
        return len(self.generation.prompt) + self.generation.max_tokens


class Refusal(NamedTuple):
    """The replica does not take the request, or not any more."""

    reason: str
    retry_after_s: float | None
    """None: to send it again will not help."""
    kind: Literal["busy", "too_long", "adapter", "adapter_too_large"] = "busy"
    """Its queue is full, or the first token would come too late; it does not fit; its adapter cannot be had, or would
    never fit into the replica's memory."""


class ReplicaReport(TypedDict):
    """What a replica says of itself about once a second."""

    max_length: int
    """Tokens that a slot has: a prompt and its answer together."""
    slots: int
    live: int
    """Requests that have a slot."""
    waiting: int
    """Requests that wait for one."""
    live_tokens: dict[str, int]
    """By gateway: what its requests here may come to hold, waiting ones included."""
    served: int
    tokens_per_s: float
    """Of answers, in a second of computing, of late."""
    step_ms: float
    """A decode step, of late."""
    squashed: int
    """Requests that were put back, since the start: they outlived what was predicted when they passed others."""
    bypassed: int
    """Requests that passed others that waited for memory, since the start."""
    classes: list[ClassReport]
    """The queues, small requests first."""
    predictor: PredictorReport
    adapters: AdapterReport
