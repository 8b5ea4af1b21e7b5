"""Each request is counted once, however it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest.mock import MagicMock, call

import pytest

from pliant.deployments.serving import metrics
from pliant.deployments.serving.metrics import Requests
from pliant.deployments.serving.outcome import Outcome, RequestError, counted


class Ends:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def retried(self, why: str) -> None:
        raise AssertionError(why)


def test_what_is_answered_is_ok_unless_it_says_otherwise() -> None:
    ends = Ends()
    with counted(ends):
        assert not ends.outcomes
    with counted(ends) as ending:
        ending.outcome = Outcome.DEGRADED
    assert ends.outcomes == [Outcome.OK, Outcome.DEGRADED]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        *((RequestError(outcome, "so it is"), outcome) for outcome in Outcome if outcome not in ("ok", "degraded")),
        (asyncio.CancelledError(), Outcome.CANCELLED),
        (GeneratorExit(), Outcome.CANCELLED),
        (ValueError("a bug"), Outcome.FAILED),
        (KeyboardInterrupt(), Outcome.FAILED),
    ],
)
def test_what_is_not_answered_is_counted_and_raised(error: BaseException, outcome: Outcome) -> None:
    ends = Ends()
    with pytest.raises(type(error)), counted(ends):
        raise error
    assert ends.outcomes == [outcome]


def test_outcomes_and_retries_have_one_name_for_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, MagicMock] = {}
    monkeypatch.setattr(metrics, "Counter", lambda name, *_, **__: made.setdefault(name, MagicMock()))
    outcomes: Counter[str] = Counter()
    for kind in ("encoder", "llm"):
        recorder = Requests(f"a {kind}", kind, outcomes)
        recorder.ended(Outcome.TOO_LATE)
        recorder.retried("stalled")
    assert outcomes == {"too_late": 2}
    assert made["pliant_requests_total"].inc.mock_calls == [
        call(tags={"kind": kind, "outcome": "too_late"}) for kind in ("encoder", "llm")
    ]
    assert made["pliant_retries_total"].inc.mock_calls == [
        call(tags={"kind": kind, "reason": "stalled"}) for kind in ("encoder", "llm")
    ]
