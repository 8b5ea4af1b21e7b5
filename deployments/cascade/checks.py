"""Whether early answers are still those that the last level would give: a few texts are read by both.

Where clients send other texts than the labelled ones, small models may be as sure as before, and wrong. The share of
early answers that the last level would give otherwise is known from the profile, and needs no labels: it can be counted
live. What that costs is bounded: a small share of early answers, one at a time in a gateway, and only where the last
level would have them hardly wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.route import Route
from pliant.deployments.cascade.run import CascadeRecorder
from pliant.deployments.serving.outcome import RequestError
from pliant.deployments.serving.tenants import Account, act_for, current
from pliant.policies.cascade.share_drift import Drift, ShareDrift
from pliant.texts import Text

logger = logging.getLogger("pliant")

_SHIFT = 0.05
"""By how much more of the early answers must differ to be worth a warning."""


class Checks:
    """Of the cascade that serves as `choice` says, and of whose early answers `share` are checked by its `last` level,
    each in `slo_s` or not at all.

    `chance` draws numbers from 0 to 1.
    """

    def __init__(
        self,
        cascade: str,
        choice: Choice,
        last: Route,
        share: float,
        slo_s: float,
        recorder: CascadeRecorder,
        chance: Callable[[], float] = lambda: random.random(),
    ) -> None:
        early = choice.candidate.before_last
        self._cascade = cascade
        self._early = early
        self._last = last
        self._share = share if early else 0.0
        self._slo_s = slo_s
        self._recorder = recorder
        self._chance = chance
        self._watched = ShareDrift(
            choice.candidate.early_difference, max(1, round(choice.texts * early)), _SHIFT, may_fall=False
        )
        self._texts = 0
        self._differing = 0
        self._drifting = False
        self._under_way: asyncio.Task[None] | None = None

    def look(self, text: Text, label: int) -> None:
        """`text` was answered early with the label of that index: check it, if it is one of the few."""
        busy = self._under_way is not None and not self._under_way.done()
        if not busy and self._chance() < self._share:
            self._under_way = asyncio.create_task(self._check(text, label))

    async def _check(self, text: Text, label: int) -> None:
        act_for(Account(), background=True)
        visit = self._last.visits[0]
        try:
            utility = current().utility(1.0)
            stops = self._last.stops(text, visit)
            reading = await visit.service.read(text, self._slo_s, utility, within_s=self._slo_s, stops=stops)
        except RequestError:
            return  # it has other things to do
        except Exception:
            logger.exception("%s: an early answer could not be checked", self._cascade)
            return
        differs = int(reading.logits[visit.columns].argmax()) != label
        self._texts += 1
        self._differing += differs
        self._recorder.checked(differs)
        self._watched.observe(1, int(differs))
        drift = self._watched.drift()
        if (drift is not None) != self._drifting:
            self._drifting = drift is not None
            self._recorder.answers_drifted(self._drifting)
            if drift:
                logger.warning("%s: %s", self._cascade, self._told(drift))
            else:
                level = self._last.levels[0]
                logger.info("%s: no more early answers differ from %s's than in the profile", self._cascade, level)

    def drift(self) -> str | None:
        """For people, while there is one."""
        drift = self._watched.drift()
        return self._told(drift) if drift else None

    def facts(self) -> dict[str, Any]:
        """For people and Prometheus."""
        return {
            "texts": self._texts,
            "differing": self._differing,
            "profiled_share": self._watched.share,
            "drift": self.drift(),
        }

    def _told(self, drift: Drift) -> str:
        lost = self._early * max(0.0, drift.recent - drift.profiled)
        return (
            f"{self._last.levels[0]} would have answered {drift.recent:.0%} of the last {drift.texts} checked texts "
            f"otherwise, {drift.profiled:.1%} when the cascade was profiled, so that up to {lost:.1%} of accuracy is "
            "lost: put labelled texts like today's into its data, and it is profiled anew"
        )
