"""Which share of a cascade's texts each level sends on, and whether that is still what its profile says.

A gateway looks at its own texts alone: they are as good a sample as those of all gateways. Texts past the gate are not
among them, as no level has sent these on.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.share_drift import Drift, ShareDrift

logger = logging.getLogger("pliant")


class Reroutes:
    """Of one candidate, which was profiled on `texts` texts."""

    def __init__(self, candidate: Candidate, texts: int) -> None:
        self.levels = candidate.levels[:-1]
        """Those that may send texts on."""
        self._watched = []
        self._drifting = [False] * len(self.levels)
        self._drifts = [0] * len(self.levels)
        self._texts = [0] * len(self.levels)
        self._rerouted = [0] * len(self.levels)
        for reached, onward in pairwise(candidate.reached):
            share = onward / reached if reached else 0.0
            self._watched.append(ShareDrift(min(1.0, share), max(1, round(texts * reached))))

    def observe(self, service: str, level: int, rerouted: bool) -> bool | None:
        """A text got a decision at `level`: True when with it a drift begins, False when one ends, None mostly.

        The log is told, too.
        """
        if level >= len(self.levels):
            return None
        watched = self._watched[level]
        self._texts[level] += 1
        self._rerouted[level] += rerouted
        watched.observe(1, int(rerouted))
        drift = watched.drift()
        if (drift is not None) == self._drifting[level]:
            return None
        self._drifting[level] = drift is not None
        if drift:
            self._drifts[level] += 1
            logger.warning("%s: at %s, %s", service, self.levels[level], _told(drift))
        else:
            logger.info("%s: at %s, as many texts are re-routed as in the profile again", service, self.levels[level])
        return self._drifting[level]

    def drifts(self) -> list[str]:
        """The drifts there are, each with its level."""
        drifts = ((level, watched.drift()) for level, watched in zip(self.levels, self._watched, strict=True))
        return [f"{level}, {_told(drift)}" for level, drift in drifts if drift]

    def facts(self) -> dict[str, dict[str, Any]]:
        """For people and Prometheus, by level: what was profiled, what became of texts, and the drift if there is."""
        found = {}
        for index, level in enumerate(self.levels):
            drift = self._watched[index].drift()
            found[level] = {
                "profiled_share": self._watched[index].share,
                "texts": self._texts[index],
                "rerouted": self._rerouted[index],
                "drifts": self._drifts[index],
                "drift": _told(drift) if drift else None,
            }
        return found


def _told(drift: Drift) -> str:
    return (
        f"{drift.recent:.0%} of the last {drift.texts} texts were re-routed, {drift.profiled:.0%} when the cascade was "
        "profiled: the texts have changed; it is profiled anew on its labelled texts that are like these, if there are "
        "enough: put more such texts into its data"
    )
