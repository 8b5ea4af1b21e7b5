"""The kinds of service that there are; the only list of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pliant.config.base import ServiceConfig
from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import Reader
from pliant.config.encoder import EncoderConfig
from pliant.config.llm import LlmConfig
from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.config.route import RouteConfig
from pliant.config.vision import VisionConfig

if TYPE_CHECKING:
    from pliant.deployments.serving.kind import Kind

Listed = tuple[type[ServiceConfig], str]
"""A kind's keys in cluster.yaml, and the module with its KIND, which is imported only where services run."""

KINDS: tuple[Listed, ...] = (
    (EncoderConfig, "pliant.deployments.encoder.kind"),
    (LlmConfig, "pliant.deployments.llm.kind"),
    (VisionConfig, "pliant.deployments.vision.kind"),
    (CascadeConfig, "pliant.deployments.cascade.kind"),
    (RouteConfig, "pliant.deployments.route.kind"),
    (LlmCascadeConfig, "pliant.deployments.llm_cascade.kind"),
)

CONFIGS = tuple(config for config, _ in KINDS)
_reader = Reader(CONFIGS)
parse = _reader.parse
read = _reader.read


def loaded(kinds: Iterable[Listed] = KINDS) -> dict[str, Kind[Any]]:
    """`kinds` by name."""
    found: list[Kind[Any]] = [import_module(module).KIND for _, module in kinds]
    return {kind.name: kind for kind in found}
