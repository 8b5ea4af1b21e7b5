"""What a classifier service counts."""

from __future__ import annotations

from collections import Counter

from pliant.deployments.encoder.messages import Answer
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.metrics import Requests, counter, gauge
from pliant.deployments.serving.outcome import Outcome


class TextMetrics(Requests):
    """As a gateway sees it; an `endpoint.TextRecorder`. `runtime` is the max_length of the runtime that answered.

    The planner hears of it, too, by `tally`.
    """

    def __init__(self, service: str, kind: str, outcomes: Counter[str], tally: Tally) -> None:
        super().__init__(service, kind, outcomes)
        self._tally = tally
        self._tokens = counter(service, "pliant_tokens_total", "Tokens of answered texts.", "runtime")
        self._padding = counter(
            service, "pliant_padding_tokens_total", "Tokens by which runtimes padded answered texts.", "runtime"
        )

    def arrived(self, tokens: int) -> None:
        self._tally.arrived(tokens)

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None:
        self.took(seconds, seconds <= slo_s)
        self._tally.answered(seconds / slo_s)
        tags = {"runtime": str(answer.max_length)}
        self._tokens.inc(tokens, tags=tags)
        if answer.computed > tokens:
            self._padding.inc(answer.computed - tokens, tags=tags)

    def shed(self) -> None:
        self._tally.shed()

    def ended(self, outcome: Outcome) -> None:
        super().ended(outcome)
        if outcome in (Outcome.UNAVAILABLE, Outcome.FAILED, Outcome.CANCELLED):
            self._tally.lost()


class ReplicaMetrics:
    """Of one replica, which Ray adds as a tag. `runtime` is the max_length that it holds."""

    def __init__(self, service: str) -> None:
        self.waiting = gauge(service, "pliant_requests_waiting", "Requests queued or running in a replica.", "runtime")
