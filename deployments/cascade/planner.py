"""Has each cascade profiled through its levels' own replicas, and chooses which candidate serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.choice import Choice, choose_for
from pliant.deployments.cascade.levels import ClassifierReader, levels_of, other_revision, run_on
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.table import FILES, KEPT, Profiled, folder_of, identity, keep, load
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.serving.choosing.part import PAUSES_S, ChoosingPart, RefusedError
from pliant.deployments.serving.kind import Planning
from pliant.models import sources
from pliant.models.revision import revision
from pliant.policies.cascade.choice import NoCandidateError
from pliant.training import labelled_texts

logger = logging.getLogger("pliant")

Texts = list[labelled_texts.LabelledText]


class CascadePart(ChoosingPart[CascadeConfig]):
    """The cascades' part of the planner.

    While a level is being compiled, or replicas have another version of its model than is configured, as in the midst
    of a deploy, a choice is provisional.
    """

    def __init__(self, planning: Planning, pauses_s: tuple[float, float] = PAUSES_S) -> None:
        super().__init__(planning, CascadeConfig, KEPT, FILES, pauses_s)
        self._encoders = planning.config.of(EncoderConfig)
        self._profiled_on: dict[str, tuple[Texts, Sequence[str]]] = {}
        """By service, the labelled texts, and the labels of which they may be."""
        self._folders: dict[str, Path] = {}
        """By level's service, of the model that it is configured with."""
        self._revisions: dict[str, str] = {}
        """Of these."""

    async def _look(self, config: CascadeConfig, parts: Mapping[str, Classifier]) -> None:
        for level in parts:
            folder = self._folders[level] = await asyncio.to_thread(sources.fetch, self._encoders[level].model)
            self._revisions[level] = await asyncio.to_thread(revision, folder)

    def _provisional(self, config: CascadeConfig) -> bool:
        return any(
            report["compiling"] or other_revision(report.get("revision"), self._revisions[level])
            for level in config.parts()
            for report in self._planning.tables[level].reports().values()
        )

    async def _others(self, name: str, config: CascadeConfig) -> bool:
        known, labels = self._profiled_on[name]
        return await asyncio.to_thread(labelled_texts.read, config.data, labels) != known

    async def _choose(
        self, name: str, config: CascadeConfig, parts: Mapping[str, Classifier], provisional: bool
    ) -> Choice:
        labels = parts[config.parts()[0]].labels
        texts = await asyncio.to_thread(labelled_texts.read, config.data, labels)
        self._profiled_on[name] = texts, labels
        backends = {level: run_on(self._planning.tables[level].reports().values()) for level in config.parts()}
        named = await asyncio.to_thread(identity, config, self._encoders, self._folders, texts, backends)
        folder = folder_of(name, named)

        async def measure() -> Profiled:
            reader = ClassifierReader(parts, {} if provisional else self._revisions)
            given = labelled_texts.sample(texts, config.seed)
            levels = levels_of(config, self._encoders, parts)
            progress = self._progress(name, "profiles its levels")
            return await profile(reader, levels, given, config.seed, config.prune, progress)

        profiled = await self._profiled(name, folder, load, measure, None if provisional else keep)
        try:
            choice = await asyncio.to_thread(choose_for, config, profiled)
        except NoCandidateError as error:
            raise RefusedError(
                "cannot keep what it promises; see /stats",
                f"{error}; the profile is in {folder}: delete it to have the levels measured again",
            ) from None
        if choice.conformal:
            logger.info("%s: %s", name, choice.conformal)
        if choice.unmet:
            logger.error("%s: does not keep its promise, but serves, as it may degrade: %s", name, choice.unmet)
        return choice

    def _told(self, name: str, choice: Any) -> str:
        candidate = choice.candidate
        return (
            f"serves {candidate}: {candidate.accuracy:.1%} ± {candidate.accuracy_error:.1%} accurate, "
            f"{1e3 * candidate.mean_latency_s:.1f} ms, {candidate.early_share:.0%} answered early"
        )
