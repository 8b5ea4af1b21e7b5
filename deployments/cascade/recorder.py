"""What becomes of a cascade's texts, as metrics."""

from __future__ import annotations

from collections import Counter

from pliant.deployments.cascade.passage import Reason
from pliant.deployments.serving.metrics import CascadeMetrics, RequestRecorder


class CascadeRecorder(RequestRecorder):
    """Counts what a `PassageRecorder` is told."""

    def __init__(self, service: str, outcomes: Counter[str]) -> None:
        super().__init__(service, "cascade", outcomes)
        self._metrics = CascadeMetrics(service)

    def answered(self, level: str, seconds: float, slo_s: float, confidence: float) -> None:
        tags = {"level": level}
        self._metrics.latency.observe(seconds, tags=tags)
        self._metrics.confidence.observe(confidence, tags=tags)
        if seconds > slo_s:
            self._metrics.slo_violations.inc()

    def rerouted(self, level: str, words: int, pruned: int) -> None:
        tags = {"level": level}
        self._metrics.rerouted.inc(tags=tags)
        if words:
            self._metrics.words.inc(words, tags=tags)
        if pruned:
            self._metrics.words_pruned.inc(pruned, tags=tags)

    def drifted(self, level: str, drifting: bool) -> None:
        tags = {"level": level}
        self._metrics.drifting.set(drifting, tags=tags)
        if drifting:
            self._metrics.drifts.inc(tags=tags)

    def degraded(self, level: str, reason: Reason) -> None:
        self._metrics.degraded.inc(tags={"level": level, "reason": reason})
