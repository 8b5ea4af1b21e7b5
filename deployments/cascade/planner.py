"""Has each cascade profiled through its levels' own replicas, once, and tells gateways which candidate serves.

Plain asyncio, without Ray. Profiles are kept in the cache, and in a `state` of several
nodes, so that the next planner reads them. While one is made, and
when none can be, all other services go on; its levels answer their own clients beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.choice import Choice, choose_for
from pliant.deployments.cascade.levels import ClassifierReader, levels_of, run_on
from pliant.deployments.cascade.messages import CascadeEntry
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.shared import SharedProfiles
from pliant.deployments.cascade.table import Profiled, folder_of, identity, keep, load
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.serving.catalog.catalog import Catalog, Seen
from pliant.deployments.serving.kind import Part, Planning
from pliant.deployments.serving.messages import CatalogNews
from pliant.deployments.serving.state.storage import storage
from pliant.errors import DataError, PliantError
from pliant.models import sources
from pliant.policies.cascade.choice import NoCandidateError
from pliant.training import labelled_texts

logger = logging.getLogger("pliant")

_GONE_S = 45.0
_NEWS_WITHIN_S = 5.0
_WAIT_S = 0.2
_WAKES_S = 0.5
_PAUSES_S = (30.0, 600.0)
_LOOK_S = 600.0
"""After so long the labelled texts are looked at again, so that a cascade is profiled anew at most so often."""
_STEP = 0.05
"""Share of a profile after which gateways hear again how far it is."""


class _RefusedError(Exception):
    """Nothing can serve before the operator does something about it; `problem` says what, for them."""

    def __init__(self, state: str, problem: str) -> None:
        super().__init__(problem)
        self.state = state
        self.problem = problem


class CascadePart(Part):
    """The cascades' part of the planner; `catalog` has them by service.

    A cascade is profiled as soon as its levels can answer, again once they are compiled if they were not then, and
    again when its labelled texts are replaced, as they should be after a drift; the earlier choice serves meanwhile.
    What fails is tried again for ever, after the first of `pauses_s`, which doubles up to the second. What was refused
    is looked at again after the second: a file may have been mended, or a profile removed.
    """

    def __init__(self, planning: Planning, pauses_s: tuple[float, float] = _PAUSES_S) -> None:
        self.catalog: Catalog[CascadeEntry] = Catalog(_GONE_S)
        self._planning = planning
        self._encoders = planning.config.of(EncoderConfig)
        self._pauses_s = pauses_s
        self._shared = SharedProfiles(storage(planning.config.state)) if planning.config.state else None
        """None where the state is in the cache folder, as the profiles are."""
        self._profiling = asyncio.Lock()
        self._useless: dict[Path, str] = {}
        """Profiles that could not be made of these texts, and why."""
        self._profiled_on: dict[str, tuple[list[labelled_texts.LabelledText], Sequence[str]]] = {}
        """By service, the labelled texts, and the labels of which they may be."""
        self._complaints: dict[str, str | None] = {}
        """By service, what the log was last told to be wrong."""
        self._tasks = [
            asyncio.create_task(self._start(name, cascade))
            for name, cascade in planning.config.of(CascadeConfig).items()
        ]

    async def news(self, follower: str, seen: Seen, wait: bool) -> CatalogNews[CascadeEntry]:
        """What became of cascades since `seen`: now, or else as soon as there is something, or after some seconds."""
        return await self.catalog.follow(follower, seen, _NEWS_WITHIN_S if wait else 0)

    def check(self) -> None:
        """Raise RuntimeError if a cascade is not seen to any more, though nothing was chosen for it."""
        for task in self._tasks:
            if task.done() and (task.cancelled() or task.exception()):
                raise RuntimeError(f"a cascade is not started any more: {task}")

    async def _start(self, name: str, config: CascadeConfig) -> None:
        """Choose what serves, once more when the levels have been compiled, and whenever there are other texts."""
        while True:
            while await self._serve_choice(name, config):
                await self._compiled(config)
            await self._other_texts(name, config)
            logger.info("%s: its labelled texts are others now", name)

    async def _other_texts(self, name: str, config: CascadeConfig) -> None:
        """Wait until its labelled texts are not those that it was profiled on, such as after a drift."""
        known, labels = self._profiled_on[name]
        told = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if await asyncio.to_thread(labelled_texts.read, config.data, labels) != known:
                    return
            except DataError as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("%s: keeps to the labelled texts that it was profiled on: %s", name, told)

    async def _compiled(self, config: CascadeConfig) -> None:
        """Wait until no level is being compiled."""
        while True:
            if not any(map(self._compiles, config.parts())):
                return
            await asyncio.sleep(_WAIT_S)

    def _compiles(self, level: str) -> bool:
        """Whether some replica of it says that it compiles."""
        return any(report["compiling"] for report in self._planning.tables[level].reports().values())

    async def _serve_choice(self, name: str, config: CascadeConfig) -> bool:
        """Choose what serves; whether the levels were being compiled, so that the choice is provisional."""
        pause_s, slowest_s = self._pauses_s
        while True:
            try:
                provisional, choice = await self._choose(name, config)
                self._serve(name, choice)
            except _RefusedError as error:
                self._complain(CascadeEntry(name, error.state, self._chosen(name), error.problem, refused=True))
                pause_s = slowest_s
            except PliantError as error:
                self._complain(CascadeEntry(name, "could not be profiled yet", self._chosen(name), str(error)))
            except Exception as error:
                self._complain(CascadeEntry(name, "could not be profiled yet", self._chosen(name), repr(error)), error)
            else:
                return provisional
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, slowest_s)

    async def _choose(self, name: str, config: CascadeConfig) -> tuple[bool, Choice]:
        """Whether the choice is provisional, and the choice."""
        async with self._awake(config.parts()):
            return await self._choose_awake(name, config)

    @asynccontextmanager
    async def _awake(self, levels: Sequence[str]) -> AsyncIterator[None]:
        """None of `levels` sleeps meanwhile: they are to be profiled, or to say on what they were."""

        async def keep() -> None:
            while True:
                for level in levels:
                    self._planning.wake(level)
                await asyncio.sleep(_WAKES_S)

        waking = asyncio.create_task(keep())
        try:
            yield
        finally:
            waking.cancel()

    async def _choose_awake(self, name: str, config: CascadeConfig) -> tuple[bool, Choice]:
        classifiers = {level: await self._planning.open(level) for level in config.parts()}
        await self._ready(name, classifiers)
        provisional = any(map(self._compiles, config.parts()))
        folders = {
            level: await asyncio.to_thread(sources.fetch, self._encoders[level].model) for level in config.parts()
        }
        try:
            labels = classifiers[config.parts()[0]].labels
            texts = await asyncio.to_thread(labelled_texts.read, config.data, labels)
            self._profiled_on[name] = texts, labels
            backends = {level: run_on(self._planning.tables[level].reports().values()) for level in config.parts()}
            named = await asyncio.to_thread(identity, config, self._encoders, folders, texts, backends)
            folder = folder_of(name, named)
            profiled = await self._profiled(name, config, classifiers, texts, folder, lasting=not provisional)
        except DataError as error:
            raise _RefusedError("cannot use its labelled texts; see /stats", str(error)) from None
        try:
            return provisional, await asyncio.to_thread(choose_for, config, profiled)
        except NoCandidateError as error:
            raise _RefusedError(
                "cannot keep what it promises; see /stats",
                f"{error}; the profile is in {folder}: delete it to have the levels measured again",
            ) from None

    async def _profiled(
        self,
        name: str,
        config: CascadeConfig,
        classifiers: Mapping[str, Classifier],
        texts: list[labelled_texts.LabelledText],
        folder: Path,
        lasting: bool,
    ) -> Profiled:
        """The profile in `folder`; made if it is not there, and then kept there if it is `lasting`.

        Raises DataError if none can be made of these texts.
        """
        if folder in self._useless:
            raise DataError(self._useless[folder])
        if self._shared:
            await asyncio.to_thread(self._shared.fetch, folder)
        if found := await asyncio.to_thread(load, folder):
            logger.info("%s: profiled before, in %s", name, folder)
            return found
        async with self._profiling:
            try:
                found = await self._profile(name, config, classifiers, texts)
            except DataError as error:
                self._useless[folder] = str(error)
                raise
        if not lasting:
            return found
        try:
            await asyncio.to_thread(keep, folder, found)
        except Exception:
            logger.exception("%s: its profile is used, but cannot be kept in %s for the next start", name, folder)
        else:
            logger.info("%s: profiled on %d texts; see %s", name, found.table.chosen_on, folder)
            if self._shared:
                await asyncio.to_thread(self._shared.share, folder)
        return found

    async def _ready(self, name: str, classifiers: Mapping[str, Classifier]) -> None:
        waiting: list[str] = []
        while now := [level for level, classifier in classifiers.items() if not classifier.ready]:
            if now != waiting:
                self._tell(name, f"waits for {', '.join(now)}")
            waiting = now
            await asyncio.sleep(_WAIT_S)

    async def _profile(
        self,
        name: str,
        config: CascadeConfig,
        classifiers: Mapping[str, Classifier],
        texts: list[labelled_texts.LabelledText],
    ) -> Profiled:
        told = ("", -1.0)

        def progress(what: str, done: float) -> None:
            nonlocal told
            if what != told[0] or done - told[1] >= _STEP:
                told = what, done
                self._tell(name, f"profiles its levels: {what}, {done:.0%}")

        levels = levels_of(config, self._encoders, classifiers)
        reader, parts = ClassifierReader(classifiers), labelled_texts.split(texts, config.seed)
        return await profile(reader, levels, *parts, config.seed, config.prune, progress)

    def _serve(self, name: str, choice: Choice) -> None:
        candidate = choice.candidate
        state = (
            f"serves {candidate}: {candidate.accuracy:.1%} ± {candidate.accuracy_error:.1%} accurate, "
            f"{1e3 * candidate.mean_latency_s:.1f} ms, {candidate.early_share:.0%} answered early"
        )
        logger.info("%s: %s", name, state)
        if choice.conformal:
            logger.info("%s: %s", name, choice.conformal)
        if choice.unmet:
            logger.error("%s: does not keep its promise, but serves, as it may degrade: %s", name, choice.unmet)
        self.catalog.put({name: CascadeEntry(name, state, choice)})

    def _tell(self, name: str, state: str) -> None:
        logger.info("%s: %s", name, state)
        self.catalog.put({name: CascadeEntry(name, state, self._chosen(name))})

    def _chosen(self, name: str) -> Choice | None:
        """What serves until something else is chosen."""
        known = self.catalog.entries.get(name)
        return known.choice if known else None

    def _complain(self, entry: CascadeEntry, bug: Exception | None = None) -> None:
        """Tell what is wrong; the log once, though it be found again and again, and where in case of a `bug`."""
        self.catalog.put({entry.service: entry})
        if self._complaints.get(entry.service) != entry.problem:
            self._complaints[entry.service] = entry.problem
            logger.error("%s: %s: %s", entry.service, entry.state, entry.problem, exc_info=bug)
