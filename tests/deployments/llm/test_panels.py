"""What the console shows of language models."""

from __future__ import annotations

from typing import Any

from support.scripted import report

from pliant.deployments.llm.panels import panels, readings
from pliant.deployments.serving.panels import Bars


class Nothing:
    """A past of which nothing is known."""

    def line(self, name: str) -> list[float]:
        return []

    def lines(self, prefix: str) -> dict[str, list[float]]:
        return {}


def held(**replicas: Any) -> Bars:
    past: Any = Nothing()
    drawn = panels({"replicas": replicas}, past)
    return next(panel for panel in drawn if isinstance(panel, Bars) and panel.title == "Memory, by what holds it")


def told(live: int, idle: int, adapters: int) -> Any:
    given: Any = report()
    given["memory"] |= {"page_bytes": 100, "pages": 8, "live": live, "idle": idle}
    given["adapters"]["bytes"] = adapters
    return given


def test_memory_is_shown_by_what_holds_it_of_all_replicas() -> None:
    bars = held(one=told(3, 2, 50), other=told(1, 0, 0))
    assert bars.bars == {"requests": 400, "prefixes kept": 200, "adapters": 50}
    assert bars.most == 1600


def test_a_replica_of_another_version_is_shown_too() -> None:
    old: Any = {key: value for key, value in report().items() if key != "memory"}
    assert held(one=old).bars == {"requests": 0, "prefixes kept": 0, "adapters": 0}


def test_tokens_that_were_there_are_counted_beside_those_computed() -> None:
    given = told(1, 1, 0)
    given["memory"] |= {"hit": 640, "missed": 70}
    counters = readings(given).counters
    assert counters["hit"] == ("prefixes/there already", 640)
    assert counters["missed"] == ("prefixes/computed", 70)
