"""Early answers that the last level is asked for, too: which, at what cost, and what comes of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from support.scripted_cascade import LABELS, CascadeRecorder, Model, Service, candidate

from pliant.config.cascade import CascadeConfig
from pliant.deployments.cascade import checks
from pliant.deployments.cascade.checks import Checks
from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.panels import panels
from pliant.deployments.cascade.route import Serving
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving import tenants
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.panels import Bars

YES = LABELS.index("yes")
EARLY = {"shares": (0.8, 0.2), "early_difference": 0.02}


class House:
    """A cascade of two levels, of which the second is always right and has its labels the other way round; all early
    answers are checked."""

    def __init__(self, share: float = 1.0, **changes: Any) -> None:
        self.small, self.large = Service(Model("small", 1.0, 0.001)), Service(Model("large", 1.0, 0.01, LABELS[::-1]))
        services: Any = {"small": self.small, "large": self.large}
        self.recorder = CascadeRecorder()
        choice = Choice(candidate("small", "large", **{**EARLY, **changes}), None, (0.001, 0.01), 1000)
        self.serving = Serving(choice, services, LABELS, 0)
        self.checks = Checks("c", choice, self.serving.last, share, 1.0, self.recorder, lambda: 0.0)

    async def look(self, text: str, label: int = YES) -> None:
        self.checks.look(text, label)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_text_is_read_by_the_last_level_for_nobody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    accounts: list[tuple[str, bool]] = []
    read = house.large.read

    async def watched(*given: Any, **options: Any) -> Any:
        accounts.append((tenants.current().name, tenants.in_background()))
        return await read(*given, **options)

    monkeypatch.setattr(house.large, "read", watched)
    tenants.act_for(tenants.Account("acme"))
    await house.look("w1 yes t1")
    await house.look("w1 no t2")
    assert house.recorder.checks == [False, True]
    assert accounts == [("anonymous", True)] * 2
    assert [call[1:3] for call in house.large.calls] == [(1.0, 0.1)] * 2, "it hardly waits, and makes nobody wait"
    assert (tenants.current().name, tenants.in_background()) == ("acme", False)
    assert house.checks.facts() == {"texts": 2, "differing": 1, "profiled_share": 0.02, "drift": None}


async def test_one_at_a_time() -> None:
    house = House()
    house.large.hangs = True
    await house.look("w1 yes t1")
    await house.look("w1 yes t2")
    assert len(house.large.calls) == 1


@pytest.mark.parametrize("failure", [RequestError(Outcome.SHED, "busy"), ValueError("a bug")])
async def test_what_cannot_be_checked_counts_for_nothing(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.large.fails = failure
    await house.look("w1 yes t1")
    house.large.fails = None
    await house.look("w1 yes t2")
    assert house.recorder.checks == [False]
    assert ("could not be checked" in caplog.text) == isinstance(failure, ValueError)


@pytest.mark.parametrize(("share", "changes"), [(0.0, {}), (1.0, {"shares": (0.0, 1.0)})])
async def test_nothing_is_checked_where_nobody_asks_for_it_or_nothing_is_early(
    share: float, changes: dict[str, Any]
) -> None:
    house = House(share, **changes)
    await house.look("w1 yes t1")
    assert not house.large.calls


async def test_more_differences_than_in_the_profile_are_told_until_they_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pliant")
    house = House()
    for number in range(2000):
        await house.look(f"w1 {'no' if number % 50 == 0 else 'yes'} t{number}")
    assert house.checks.drift() is None, "as many as in the profile"
    for number in range(200):
        await house.look(f"w1 {'no' if number % 4 == 0 else 'yes'} t{number}")
    told = house.checks.drift()
    assert told
    assert told.startswith("large would have answered 2")
    assert "2.0% when the cascade was profiled, so that up to 1" in told
    assert "c: large would have answered 2" in caplog.text
    for number in range(2000):
        await house.look(f"w1 yes t{number}")
    assert house.checks.drift() is None
    assert "c: no more early answers differ from large's than in the profile" in caplog.text
    assert house.recorder.answers_drifts == [True, False]


async def test_a_cascade_checks_a_share_of_its_early_answers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    monkeypatch.setattr(checks.random, "random", iter([0.5, 0.01]).__next__)
    config = CascadeConfig(kind="cascade", levels=("small", "large"), data="d", accuracy_loss=0.01, check=0.05)
    sure = candidate("small", "large", cutoff=0.0, slope=1e6, **EARLY)
    entry = Chosen("c", "serves", Choice(sure, None, (0.001, 0.01), 1000))
    services: Any = {"small": house.small, "large": house.large}
    cascade = CascadeClassifier("c", config, services, lambda: entry, house.recorder)
    for text in ("yes t1", "yes t2"):
        [prediction] = await cascade.classify([text], ClassifyParameters())
        assert prediction.details
        assert prediction.details.level == "small"
        for _ in range(5):
            await asyncio.sleep(0)
    assert [call[0] for call in house.large.calls] == ["yes t2"]
    assert house.recorder.levels == ["small", "small"], "a check asks for no replica"
    facts = cascade.facts()
    assert facts["checks"]["texts"] == 1
    assert facts["warnings"] == []
    assert Bars("Early answers that large gives otherwise, of 1", {"now": 0.0, "in the profile": 0.02}, "%") in [
        *panels(facts)
    ]
