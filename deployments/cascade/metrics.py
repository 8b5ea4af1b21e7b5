"""What cascades count, beside their levels, and what /stats says of them, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric

from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.metric_table import Described, Rows, Table, labelled
from pliant.deployments.serving.metrics import Requests, counter, gauge, histogram
from pliant.deployments.serving.outcome import Trouble
from pliant.policies.cascade.resemblance import EDGES, degree

_SURE = [*EDGES, 1.0]

_DRIFTING = Described(
    False,
    "pliant_cascade_reroute_drifting",
    "Whether the level sends on another share of texts now than in the profile.",
)
_DRIFTS = Described(True, "pliant_cascade_reroute_drifts", "Times that such a drift began.")
_CHECKS = Described(True, "pliant_cascade_checks", "Early answers that the last level was asked for, too.")
_DIFFERING = Described(True, "pliant_cascade_checks_differing", "Of these, those that it would have given otherwise.")
_ANSWERS_DRIFTING = Described(
    False,
    "pliant_cascade_answers_drifting",
    "Whether the last level would give more of the early answers otherwise than in the profile.",
)
_ALL: Table = {
    "ready": Described(False, "pliant_cascade_ready", "Whether a candidate is chosen and its levels are up."),
}
_CHOSEN: Table = {
    "kept": Described(False, "pliant_cascade_promise_kept", "Whether what serves meets what was asked for."),
    "accuracy": Described(False, "pliant_cascade_profiled_accuracy", "Of what serves, on the labelled texts."),
}
_CHECKED: Table = {
    "texts": _CHECKS,
    "differing": _DIFFERING,
    "profiled_share": Described(
        False,
        "pliant_cascade_profiled_difference",
        "Of early answers that the last level gave otherwise in the profile.",
    ),
    "drifting": _ANSWERS_DRIFTING,
}
_REROUTES: Table = {
    "profiled_share": Described(
        False, "pliant_cascade_profiled_reroute_share", "Of texts that the level sent on in the profile."
    ),
    "drifting": _DRIFTING,
    "drifts": _DRIFTS,
}


class CascadeMetrics(Requests):
    """As a gateway sees it; a `CascadeRecorder`. `level` is a service, of answers the last one that read the text.

    The planner hears by `tally` what levels are asked, how sure the first one is, and of drifts.
    """

    def __init__(self, service: str, kind: str, outcomes: Counter[str], tally: Tally) -> None:
        super().__init__(service, kind, outcomes)
        self._tally = tally
        self._answers = counter(service, "pliant_cascade_answers_total", "Answers by level.", "level")
        self._rerouted = counter(
            service, "pliant_cascade_rerouted_total", "Texts that a level sent on to the next.", "level"
        )
        self._words = counter(service, "pliant_cascade_words_total", "Words of texts that were pruned.", "level")
        self._words_pruned = counter(
            service, "pliant_cascade_words_pruned_total", "Words that the level after did not read.", "level"
        )
        self._drifting = gauge(service, *_DRIFTING[1:], "level")
        self._drifts = counter(service, f"{_DRIFTS.name}_total", _DRIFTS.description, "level")
        self._checks = counter(service, f"{_CHECKS.name}_total", _CHECKS.description)
        self._differing = counter(service, f"{_DIFFERING.name}_total", _DIFFERING.description)
        self._answers_drifting = gauge(service, *_ANSWERS_DRIFTING[1:])
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

    def asked(self, level: str) -> None:
        self._tally.asked(level)

    def begun(self, sure: float) -> None:
        self._tally.sure(degree(sure))

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

    def checked(self, differs: bool) -> None:
        self._checks.inc()
        if differs:
            self._differing.inc()

    def answers_drifted(self, drifting: bool) -> None:
        self._answers_drifting.set(drifting)

    def drifted(self, level: str, drifting: bool) -> None:
        tags = {"level": level}
        self._drifting.set(drifting, tags=tags)
        if drifting:
            self._drifts.inc(tags=tags)
            self._tally.drifted()

    def degraded(self, level: str, reason: Trouble) -> None:
        self._degraded.inc(tags={"level": level, "reason": reason})


def cascade_metrics(views: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """What "/stats" says of cascades, for Prometheus."""
    chosen = {name: view for name, view in views.items() if "levels" in view}
    yield from labelled(_ALL, [((name,), view) for name, view in views.items()], "service")
    kept: Rows = [((name,), {**view, "kept": view["unmet"] is None}) for name, view in chosen.items()]
    yield from labelled(_CHOSEN, kept, "service")
    checked: Rows = [
        ((name,), {**view["checks"], "drifting": view["checks"]["drift"] is not None}) for name, view in chosen.items()
    ]
    yield from labelled(_CHECKED, checked, "service")
    reroutes: Rows = [
        ((name, level), {**one, "drifting": one["drift"] is not None})
        for name, view in chosen.items()
        for level, one in view["reroutes"].items()
    ]
    yield from labelled(_REROUTES, reroutes, "service", "level")
