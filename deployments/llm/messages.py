"""What replicas of a language model say of themselves, and what the planner says of adapters."""

from __future__ import annotations

from typing import NamedTuple

from pliant.deployments.llm.report import AdapterReport, ClassReport, MemoryReport, PredictorReport
from pliant.deployments.serving.parcels import Report
from pliant.formats.adapter_info import AdapterRef
from pliant.message import message


@message
class Registered(NamedTuple):
    """A LoRA adapter that clients may name as a model."""

    service: str
    """The language model that it adapts."""
    adapter: AdapterRef
    created: int
    """When it was registered, in Unix seconds."""
    owner: str = ""
    """The tenant that loaded it; empty of those in folders."""


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
    prompt_tokens_per_s: float
    squashed: int
    """Requests that were put back, since the start: they outlived what was predicted when they passed others."""
    preempted: int
    """Requests that were put back, since the start: memory was short, and others had come before them."""
    bypassed: int
    """Requests that passed others that waited for memory, since the start."""
    classes: list[ClassReport]
    """The queues, small requests first."""
    predictor: PredictorReport
    memory: MemoryReport
    digest: str
    """Names of prefixes that are there, as `chooser` reads them: where they end or branch, the latest used."""
    adapters: AdapterReport
