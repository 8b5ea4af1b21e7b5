"""What the console shows of language models."""

from __future__ import annotations

from typing import Any

from support.scripted import report

from pliant.deployments.kinds import KINDS, loaded
from pliant.deployments.llm.panels import panels, readings
from pliant.deployments.serving.history import History
from pliant.deployments.serving.panels import Chart, Stacks


class Nothing:
    """A past of which nothing is known."""

    def line(self, name: str) -> list[float]:
        return []

    def lines(self, prefix: str) -> dict[str, list[float]]:
        return {}


def held(**replicas: Any) -> Stacks:
    past: Any = Nothing()
    drawn = panels({"replicas": replicas}, past)
    return next(panel for panel in drawn if isinstance(panel, Stacks))


def told(live: int, idle: int, adapters: int) -> Any:
    given: Any = report()
    given["memory"] |= {"page_bytes": 100, "pages": 8, "live": live, "idle": idle}
    given["adapters"]["bytes"] = adapters
    return given


def test_memory_is_shown_of_each_replica_by_what_holds_it() -> None:
    assert held(one=told(3, 2, 50), other=told(1, 0, 0)).rows == {
        "one": {"requests": 300, "prefixes kept": 200, "adapters": 50, "free": 250},
        "other": {"requests": 100, "prefixes kept": 0, "adapters": 0, "free": 700},
    }


def test_adapters_that_are_loaded_into_what_prefixes_still_hold_leave_nothing_free() -> None:
    assert held(one=told(3, 5, 50)).rows["one"]["free"] == 0


def test_a_replica_that_has_not_reported_its_memory_is_left_out() -> None:
    assert held(one={}).rows == {}


def test_waits_are_means_of_those_admitted_and_steps_of_replicas() -> None:
    past = History(loaded(KINDS))
    for step in range(3):
        given = told(1, 1, 0)
        given |= {
            "step_ms": 30.0 + 10 * step,
            "classes": [{"waiting": 2, "admitted": 4 * step, "waited_s": 2.0 * step}],
            "prompts": 5 * step,
            "prompts_s": 1.0 * step,
        }
        view = {"kind": "llm", "ready": True, "state": "", "plan": {}, "requests_by_gateway": {}}
        view["replicas"] = {"one": given, "other": {**given, "step_ms": 10.0}}
        past.record(5.0 * step, {"planner_reached": True, "services": {"chat": view}})
    charts = {panel.title: panel for panel in panels(view, past.of("chat")) if isinstance(panel, Chart)}
    first = charts["Time to the first token, mean"].lines
    assert first["wait for a slot"][-3:] == [0, 500, 500]
    assert first["prompt"][-3:] == [0, 200, 200]
    assert charts["Time between two tokens, mean"].lines["step"][-3:] == [20, 25, 30]
    assert charts["Answers that wait, by queue"].lines["1"][-1] == 4


def test_tokens_that_were_there_are_counted_beside_those_computed() -> None:
    given = told(1, 1, 0)
    given["memory"] |= {"hit": 640, "missed": 70}
    counters = readings(given).counters
    assert counters["hit"] == ("prefixes/there already", 640)
    assert counters["missed"] == ("prefixes/computed", 70)
