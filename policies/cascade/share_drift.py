"""Whether as many texts as when a cascade was profiled have some fate (beyond Tabi §5).

Cut-offs are chosen for texts like those of the profile. When others come, the share that is re-routed tends to move
first, without any label, or that of early answers which the last level would give otherwise. Two cumulative sums
(Page's test), one for more and one for less, add up how much likelier each text's fate is under a share moved by
`shift` than under the profiled one, and start anew whenever that speaks against a move. A share near 0 that cannot fall
so far is watched for a fall to a quarter of it, and one near 1 likewise for a rise. Without drift, either sum takes at
least `false_alarm_texts` texts, on average, to cry wolf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHIFT = 0.1
FALSE_ALARM_TEXTS = 1e6
PROFILE_ERRORS = 2.0
"""Standard errors by which the profiled share itself may be off; a shift counts from there."""
FARTHEST = 4.0
"""A share, or what it lacks to 1, is watched for a move to no less than one in so many of it."""
REMEMBERED = 2.0
"""Evidence is kept up to this many times what raises the alarm, so that the end of a drift shows as well."""


@dataclass(frozen=True)
class Drift:
    """The share is no longer what it was."""

    profiled: float
    """The share when the cascade was profiled."""
    recent: float
    """The share since it moved."""
    texts: int
    """How many texts that was."""


class _Side:
    """Evidence that the share moved from `before` to `after`, since it last was none."""

    def __init__(self, before: float, after: float) -> None:
        self.evidence = 0.0
        self.texts = 0
        self.met = 0
        self._met_gain = math.log(after / before)
        self._other_gain = math.log((1 - after) / (1 - before))

    def observe(self, texts: int, met: int, most: float) -> None:
        self.evidence += met * self._met_gain + (texts - met) * self._other_gain
        self.evidence = min(self.evidence, most)
        self.texts += texts
        self.met += met
        if self.evidence <= 0:
            self.evidence, self.texts, self.met = 0.0, 0, 0


class ShareDrift:
    """Watches the share of texts that have a fate.

    `share` is the profiled one, from 0 to 1, over `profiled_texts` texts; `shift` the smallest move that matters, of
    which about half goes unnoticed; a fall does only where it `may_fall`. Raises ValueError for numbers that make no
    sense.
    """

    def __init__(
        self,
        share: float,
        profiled_texts: int,
        shift: float = SHIFT,
        false_alarm_texts: float = FALSE_ALARM_TEXTS,
        may_fall: bool = True,
    ) -> None:
        if not 0 <= share <= 1 or profiled_texts < 1 or not 0 < shift < 1 or not false_alarm_texts > 1:
            raise ValueError(
                f"needs a share from 0 to 1, a profiled text, a shift between 0 and 1 and more than one text between "
                f"false alarms, got {share}, {profiled_texts}, {shift}, {false_alarm_texts}"
            )
        self.share = share
        before = (share * profiled_texts + 1) / (profiled_texts + 2)
        error = PROFILE_ERRORS * math.sqrt(before * (1 - before) / profiled_texts)
        self._alarm = math.log(false_alarm_texts)
        low, high = before - error, before + error
        ends = [(high, min(high + shift, 1 - (1 - high) / FARTHEST))]
        if may_fall:
            ends.append((low, max(low - shift, low / FARTHEST)))
        self._sides = [_Side(*end) for end in ends if 0 < end[0] < 1]

    def observe(self, texts: int, met: int) -> None:
        """Since the last call there were `texts`, of which `met` had that fate."""
        if not 0 <= met <= texts:
            raise ValueError(f"of {texts} texts {met} cannot have met with it")
        for side in self._sides:
            side.observe(texts, met, REMEMBERED * self._alarm)

    def drift(self) -> Drift | None:
        """What has changed, as long as the evidence for it stands."""
        side = max(self._sides, key=lambda side: side.evidence, default=None)
        if side is None or side.evidence < self._alarm:
            return None
        return Drift(self.share, side.met / side.texts, side.texts)
