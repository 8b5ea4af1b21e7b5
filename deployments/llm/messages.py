"""What replicas of a language model say of themselves, and what the planner says of adapters."""

from __future__ import annotations

from typing import NamedTuple, NotRequired

from pliant.deployments.llm.report import EngineReport
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


class ReplicaReport(EngineReport, Report):
    """What a replica says of itself about once a second; it holds live tokens: prompts, and the longest answers."""

    fingerprint: NotRequired[str]
    """Of its model, and of how it computes (see `fingerprint.fingerprint`)."""
