"""What replicas of a language model say of themselves."""

from __future__ import annotations

from pliant.deployments.llm.report import AdapterReport, ClassReport, PredictorReport
from pliant.deployments.serving.parcels import Report


class ReplicaReport(Report):
    """What a replica says of itself about once a second; it holds live tokens: prompts, and the longest answers."""

    max_length: int
    """Tokens that a slot has: a prompt and its answer together."""
    slots: int
    live: int
    """Requests that have a slot."""
    waiting: int
    """Requests that wait for one."""
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
