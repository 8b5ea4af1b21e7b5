"""What the console remembers: levels, rates of counters that come and go with replicas, and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pliant.deployments.serving.history import STEPS, Event, History, Past
from pliant.deployments.serving.panels import Panel, Readings


class Shown:
    answers = "texts"

    def readings(self, report: Mapping[str, Any]) -> Readings:
        return Readings({"waiting": report["waiting"]}, {"served": (f"texts/{report['length']}", report["served"])})

    def panels(self, view: Mapping[str, Any], past: Past) -> Iterator[Panel]:
        yield from ()


@pytest.fixture
def history() -> History:
    return History({"toy": Shown()})


def report(served: int, length: int = 64, waiting: int = 0, **more: Any) -> dict[str, Any]:
    return {"served": served, "length": length, "waiting": waiting, **more}


def stats(replicas: Mapping[str, Any], ok: int = 0, reached: bool = True, **more: Any) -> dict[str, Any]:
    view = {"kind": "toy", "ready": True, "state": "ready", "plan": {}, "replicas": replicas}
    requests = {"requests_by_gateway": {"g": {"ok": ok}}}
    return {"planner_reached": reached, "services": {"a": {**view, **requests, **more}}}


def latest(history: History, name: str) -> float:
    return history.of("a").line(name)[-1]


def test_levels_are_added_up_and_counters_become_rates(history: History) -> None:
    history.record(0.0, stats({"x": report(10, waiting=1), "y": report(5, 512, waiting=2)}, ok=20))
    assert latest(history, "texts/64") == 0, "nothing is known of the time before"
    history.record(5.0, stats({"x": report(20, waiting=1), "y": report(10, 512, waiting=2)}, ok=35))
    assert history.of("a").lines("texts/") == {
        "64": [0.0, 2.0],
        "512": [0.0, 1.0],
    }
    assert (latest(history, "waiting"), latest(history, "replicas"), latest(history, "requests/ok")) == (3, 2, 3)


def test_replicas_that_come_go_and_change_never_count_what_was_before(history: History) -> None:
    history.record(0.0, stats({"x": report(1000), "y": report(1000)}))
    history.record(5.0, stats({"x": report(1010, 512), "z": report(500)}))
    assert (latest(history, "texts/64"), latest(history, "texts/512")) == (0.0, 2.0)
    history.record(10.0, stats({"x": report(0, 512), "z": report(510)}))
    assert (latest(history, "texts/64"), latest(history, "texts/512")) == (2.0, 0.0), "x began again"


def test_all_gateways_are_added_up_and_one_that_comes_late_or_goes_is_no_burst(history: History) -> None:
    seen: list[dict[str, dict[str, int]]] = [
        {"g": {}},
        {"g": {"ok": 5}},
        {"g": {"ok": 10}, "h": {"ok": 5000}},
        {"g": {"ok": 15}, "h": {"ok": 5010, "shed": 10}},
        {"g": {"ok": 20}},
        {"g": {"ok": 25}, "h": {"ok": 9000}},
    ]
    for step, requests in enumerate(seen):
        history.record(5.0 * step, stats({}, requests_by_gateway=requests))
    assert history.of("a").line("requests/ok")[-6:] == [0.0, 1.0, 1.0, 3.0, 1.0, 1.0]
    assert history.of("a").line("requests/shed")[-6:] == [0.0, 0.0, 0.0, 2.0, 0.0, 0.0]


def test_it_forgets_after_a_quarter_of_an_hour(history: History) -> None:
    for step in range(STEPS + 20):
        history.record(5.0 * step, stats({"x": report(10 * step)}, ok=step))
    assert history.of("a").line("texts/64") == [2.0] * STEPS
    assert history.of("a").attained(12) == 1.0
    assert history.of("nobody").attained(12) is None


def test_events_say_what_happened(history: History) -> None:
    history.record(0.0, stats({"x": report(0)}))
    history.record(1.0, stats({"x": report(0, ejected=True), "y": report(0)}, reached=False))
    history.record(2.0, stats({"y": report(0)}, ready=False, state="loading"))
    because = {"wanted_because": "took 1 from b"}
    plan = {"version": 1, "reason": "shift", "replicas": {64: 1, 512: 2}, "wanted_replicas": 3}
    history.record(3.0, stats({"y": report(0)}, plan=plan))
    history.record(4.0, stats({"y": report(0)}, plan={**plan, "version": 2, "wanted_replicas": 4, **because}))
    assert list(history.events) == [
        Event(1.0, "a", "replica y runs"),
        Event(1.0, "a", "replica x failed too often, and is left alone for a while", True),
        Event(1.0, "", "the planner cannot be reached; all goes on as it was", True),
        Event(2.0, "a", "replica x has left", True),
        Event(2.0, "a", "not ready: loading", True),
        Event(2.0, "", "the planner answers again"),
        Event(3.0, "a", "ready"),
        Event(3.0, "a", "new plan (shift): replicas by home length: 1 at 64, 2 at 512"),
        Event(4.0, "a", "3 → 4 replicas wanted: took 1 from b"),
    ]


def test_a_service_that_misses_its_objective_is_said_for_as_long_as_there_is_one(history: History) -> None:
    for step, failed in enumerate((0, 10)):
        requests = {"requests_by_gateway": {"g": {"ok": 30, "failed": failed}}}
        history.record(5.0 * step, stats({}, **requests))
    assert history.shortfalls() == ["a answered 0.0% of the last minute's requests in time"]
    history.record(10.0, {"planner_reached": True, "services": {}})
    assert history.shortfalls() == []
