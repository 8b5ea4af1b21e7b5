"""What a cascade counts; its levels' own metrics count its texts, too."""

from __future__ import annotations

from collections import Counter

from pliant.deployments.serving.metrics import Requests, counter, gauge, histogram
from pliant.deployments.serving.outcome import Trouble

_SURE = [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0]


class CascadeMetrics(Requests):
    """As a gateway sees it; a `CascadeRecorder`. `level` is a service, of answers the last one that read the text."""

    def __init__(self, service: str, kind: str, outcomes: Counter[str]) -> None:
        super().__init__(service, kind, outcomes)
        self._answers = counter(service, "pliant_cascade_answers_total", "Answers by level.", "level")
        self._rerouted = counter(
            service, "pliant_cascade_rerouted_total", "Texts that a level sent on to the next.", "level"
        )
        self._words = counter(service, "pliant_cascade_words_total", "Words of texts that were pruned.", "level")
        self._words_pruned = counter(
            service, "pliant_cascade_words_pruned_total", "Words that the level after did not read.", "level"
        )
        self._drifting = gauge(
            service,
            "pliant_cascade_reroute_drifting",
            "Whether the level sends on another share of texts now than in the profile.",
            "level",
        )
        self._drifts = counter(
            service, "pliant_cascade_reroute_drifts_total", "Times that such a drift began.", "level"
        )
        self._degraded = counter(
            service,
            "pliant_cascade_degraded_total",
            "Texts answered without a level that was to read them, by why.",
            "level",
            "reason",
        )
        self._confidence = histogram(
            service, "pliant_cascade_confidence", "Calibrated, of answers that were given.", _SURE, "level"
        )

    def answered(self, level: str, seconds: float, slo_s: float, confidence: float) -> None:
        tags = {"level": level}
        self.took(seconds, seconds <= slo_s)
        self._answers.inc(tags=tags)
        self._confidence.observe(confidence, tags=tags)

    def rerouted(self, level: str, words: int, pruned: int) -> None:
        tags = {"level": level}
        self._rerouted.inc(tags=tags)
        if words:
            self._words.inc(words, tags=tags)
        if pruned:
            self._words_pruned.inc(pruned, tags=tags)

    def drifted(self, level: str, drifting: bool) -> None:
        tags = {"level": level}
        self._drifting.set(drifting, tags=tags)
        if drifting:
            self._drifts.inc(tags=tags)

    def degraded(self, level: str, reason: Trouble) -> None:
        self._degraded.inc(tags={"level": level, "reason": reason})
