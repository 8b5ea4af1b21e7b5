"""`pliant plan` against a small server that answers /stats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.answering import answering

from pliant.cli.plan import show
from pliant.cli.terminal import console
from pliant.errors import PliantError

BUDGET = {"demand_per_s": 12.0, "in_time": 0.91, "one_more": 0.04, "start_s": 8.4, "start_measured": True}


def stats(because: str, **budget: Any) -> bytes:
    plan = {"wanted_replicas": 3, "wanted_because": because, **budget}
    services = {"chat": {"plan": plan, "replicas": {"a": {}, "b": {}}}, "digits": {"plan": {}, "replicas": {}}}
    return json.dumps({"services": services}).encode()


def test_each_service_that_shares_is_shown_with_the_reason() -> None:
    with answering(200, stats("what it could earn", budget=BUDGET)) as url, console.capture() as printed:
        show(url)
    text = printed.get()
    for said in ("chat", "2", "3", "12.00", "91.0%", "4.0%", "8 s", "earn"):
        assert said in text
    assert "digits" not in text


def test_a_start_that_nobody_has_measured_is_marked() -> None:
    assumed = {**BUDGET, "start_s": 30.0, "start_measured": False}
    with answering(200, stats("why", budget=assumed)) as url, console.capture() as printed:
        show(url)
    assert "30 s?" in printed.get()


def test_what_cascades_ask_is_said() -> None:
    asked = {**BUDGET, "of_these_by": {"topics-c": 3.25}}
    with answering(200, stats("why", budget=asked)) as url, console.capture() as printed:
        show(url)
    assert "chat: 3.25 of its requests per second were topics-c's" in printed.get()


def test_what_corrects_the_plan_is_said() -> None:
    corrected = {**BUDGET, "measured_in_time": 0.72, "correction": 1.82}
    with answering(200, stats("why", budget=corrected)) as url, console.capture() as printed:
        show(url)
    assert "chat: 72% of its last requests were in time, so its demand counts 1.8 times" in printed.get()


def test_before_the_first_decision_the_reason_is_there() -> None:
    with answering(200, stats("the least do not fit")) as url, console.capture() as printed:
        show(url)
    assert "least" in printed.get()


def test_without_a_budget_it_says_what_to_write() -> None:
    nothing = json.dumps({"services": {"a": {"plan": {}}}}).encode()
    with answering(200, nothing) as url, pytest.raises(PliantError, match=r"budget: \{\}"):
        show(url)
