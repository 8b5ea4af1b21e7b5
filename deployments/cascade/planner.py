"""Has each cascade profiled through its levels' own replicas, and chooses which candidate serves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.choice import Choice, choose_for
from pliant.deployments.cascade.levels import ClassifierReader, levels_of, other_revision, run_on
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.table import FILES, KEPT, Profiled, folder_of, identity, keep, load
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.serving.choosing.part import PAUSES_S, ChoosingPart, RefusedError
from pliant.deployments.serving.kind import Planning
from pliant.deployments.serving.messages import News
from pliant.models import sources
from pliant.models.revision import revision
from pliant.policies.cascade.calibration import Integers
from pliant.policies.cascade.choice import NoCandidateError
from pliant.policies.cascade.resemblance import alike
from pliant.policies.encoder.confidence import confidence, softmax
from pliant.training import labelled_texts

logger = logging.getLogger("pliant")

Texts = list[labelled_texts.LabelledText]

LIVE = 1000
"""Texts since a drift began, after which it is known what they are like."""
MORE = 1.25
"""A level that serves alone since a drift does so until as many times more labelled texts are like what comes."""


class CascadePart(ChoosingPart[CascadeConfig]):
    """The cascades' part of the planner.

    While a level is being compiled, or replicas have another version of its model than is configured, as in the midst
    of a deploy, a choice is provisional. After a drift a cascade is profiled anew on those of its labelled texts that
    are like what comes now, and chosen by them, for as long as it is not chosen again. If a level alone is chosen then,
    which sends nothing on, how sure it is tells when other texts come.
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
        self._by_all: dict[str, Profiled] = {}
        """By service, its profile on all labelled texts."""
        self._live: dict[str, Counter[int]] = {}
        """By service of which texts drift, how many came since then, by how sure the first level was."""

    def hear(self, service: str, news: News) -> None:
        if news.drifts and self._chosen(service):  # else it is of what an earlier planner chose
            self._live.setdefault(service, Counter())
        if service in self._live:
            self._live[service].update(news.sure)

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
        if self._knows_live(name):
            serving = self._chosen(name)
            if not _alone_since(serving) or len(self._alike(name)) > MORE * serving.texts:
                return True
            self._live[name].clear()
        return await asyncio.to_thread(labelled_texts.read, config.data, labels) != known

    async def _choose(
        self, name: str, config: CascadeConfig, parts: Mapping[str, Classifier], provisional: bool
    ) -> Choice:
        labels = parts[config.parts()[0]].labels
        texts = await asyncio.to_thread(labelled_texts.read, config.data, labels)
        if self._profiled_on.get(name) != (texts, labels):
            self._live.pop(name, None)  # texts that were put there lately are like those that come
        self._profiled_on[name] = texts, labels
        backends = {level: run_on(self._planning.tables[level].reports().values()) for level in config.parts()}
        named = await asyncio.to_thread(identity, config, self._encoders, self._folders, texts, backends)
        folder = folder_of(name, named)
        given = labelled_texts.sample(texts, config.seed)

        async def measure(by: Texts) -> Profiled:
            reader = ClassifierReader(parts, {} if provisional else self._revisions)
            levels = levels_of(config, self._encoders, parts)
            progress = self._progress(name, "profiles its levels")
            return await profile(reader, levels, by, config.seed, config.prune, progress)

        profiled = await self._profiled(name, folder, load, partial(measure, given), None if provisional else keep)
        self._by_all[name] = profiled
        where = f"the profile is in {folder}: delete it to have the levels measured again"
        taken_from = 0
        if like_live := self._like_live(name, given):
            taken_from = profiled.table.texts
            profiled = await self._profiled(name, folder, lambda _: None, partial(measure, like_live), None)
            where = f"by the {len(like_live)} labelled texts that are like those that come now: put more into its data"
        try:
            choice = await asyncio.to_thread(choose_for, config, profiled)
        except NoCandidateError as error:
            raise RefusedError("cannot keep what it promises; see /stats", f"{error}; {where}") from None
        choice = choice._replace(taken_from=taken_from)
        self._keep_watch(name, choice)
        if choice.conformal:
            logger.info("%s: %s", name, choice.conformal)
        if choice.unmet:
            logger.error("%s: does not keep its promise, but serves, as it may degrade: %s", name, choice.unmet)
        return choice

    def _knows_live(self, name: str) -> bool:
        """Whether texts drift, and it is known what they are like."""
        return name in self._live and self._live[name].total() >= LIVE

    def _keep_watch(self, name: str, choice: Choice) -> None:
        """Of what comes, by `choice`, which is to serve from now on."""
        before = self._chosen(name)
        if before is None or _first(before) != _first(choice):
            self._live.pop(name, None)
        if _alone_since(choice):
            self._live[name] = Counter()

    def _alike(self, name: str) -> Integers:
        """Which of the texts that it was profiled on are like what comes since a drift."""
        profiled, (first, temperature) = self._by_all[name], _first(self._chosen(name))
        place = [level.name for level in profiled.table.levels].index(first)
        logits = np.log(np.maximum(profiled.probabilities[place], np.finfo(np.float64).tiny))
        sure = confidence(softmax(logits, temperature / profiled.table.levels[place].temperature))
        return alike(sure, self._live[name])

    def _like_live(self, name: str, given: Texts) -> Texts:
        """Of the `given` texts those that are like what comes since a drift, if that is known; once for each drift."""
        if not self._knows_live(name):
            return []
        profiled, rows = self._by_all[name], self._alike(name)
        del self._live[name]
        if len(rows) < labelled_texts.FEWEST:
            logger.warning(
                "%s: after a drift %d of %d labelled texts are like those that come; %d are needed to profile it on: "
                "put more such texts into its data",
                name,
                len(rows),
                profiled.table.texts,
                labelled_texts.FEWEST,
            )
            return []
        return [given[place] for place in profiled.given[rows].tolist()]

    def _told(self, name: str, choice: Any) -> str:
        candidate = choice.candidate
        told = (
            f"serves {candidate}: {candidate.accuracy:.1%} ± {candidate.accuracy_error:.1%} accurate, "
            f"{1e3 * candidate.mean_latency_s:.1f} ms, {candidate.before_last:.0%} answered early"
        )
        if choice.taken_from:
            told += f", by the {choice.texts} of {choice.taken_from} labelled texts that are like those that come now"
        return told


def _first(choice: Choice) -> tuple[str, float]:
    """The level that reads a text first, and its temperature."""
    return choice.candidate.levels[0], choice.candidate.temperatures[0]


def _alone_since(choice: Choice) -> bool:
    """Whether one level alone serves, since a drift."""
    return choice.taken_from > 0 and len(choice.candidate.levels) == 1
