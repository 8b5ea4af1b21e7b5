"""Encoders of texts on runtimes compiled per input length (Arlo)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from prometheus_client.core import Metric

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder import panels
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.embedder import Embedder
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.messages import MOST_WAITING
from pliant.deployments.encoder.metrics import TextMetrics, encoder_metrics
from pliant.deployments.encoder.planner import EncoderPart
from pliant.deployments.encoder.reading import Reader
from pliant.deployments.encoder.tagger import Tagger
from pliant.deployments.encoder.valuer import TextValuer
from pliant.deployments.serving.history import Past
from pliant.deployments.serving.kind import Kind, Opening, Planning
from pliant.deployments.serving.panels import Panel, Readings
from pliant.deployments.serving.services import Answers
from pliant.models import sources
from pliant.models.encoder_head import Task
from pliant.models.revision import interface
from pliant.policies.encoder.dispatch import Algorithm1

ENDPOINTS: dict[Task, type[Reader]] = {"classify": Classifier, "embed": Embedder, "tokens": Tagger}


class EncoderKind(Kind[EncoderConfig]):
    config = EncoderConfig
    answers: ClassVar[Answers] = "texts"

    def replica(self) -> type:
        from pliant.deployments.encoder.replica import EncoderReplica

        return EncoderReplica

    def most_ongoing(self, config: EncoderConfig) -> int:
        """More than wait in an engine, which refuses by tenant."""
        return 2 * MOST_WAITING

    def chooser(self, config: EncoderConfig) -> EncoderChooser:
        rule = config.dispatch
        return EncoderChooser(config.slo_ms / 1e3, Algorithm1(rule.threshold, rule.decay, rule.peek) if rule else None)

    async def open(self, opening: Opening[EncoderConfig]) -> Reader:
        folder = await opening.fetch(sources.fetch)
        recorder = TextMetrics(opening.name, self.name, opening.outcomes, opening.tally)
        chooser = opening.table.chooser
        assert isinstance(chooser, EncoderChooser)
        info = sources.describe(folder)
        chooser.read_as(await asyncio.to_thread(interface, folder, info))
        return ENDPOINTS[info.task](
            opening.name, opening.config, folder, info, chooser, opening.table, opening.caller(recorder), recorder
        )

    def part(self, planning: Planning) -> EncoderPart:
        return EncoderPart(planning)

    def valuer(self, config: EncoderConfig) -> TextValuer:
        return TextValuer(config)

    def readings(self, report: Mapping[str, Any]) -> Readings:
        return panels.readings(report)

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        return panels.panels(view, past)

    def metrics(self, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        return encoder_metrics(services)


KIND = EncoderKind()
