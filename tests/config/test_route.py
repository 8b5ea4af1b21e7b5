"""Routes in cluster.yaml: what is accepted, and that each mistake is told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pliant.config.cluster import check_models
from pliant.config.route import RouteConfig
from pliant.deployments import kinds
from pliant.errors import ConfigError

ROUTE = {
    "kind": "route",
    "by": "topics",
    "to": {"strings": "logging-8", "debugger": "other"},
    "otherwise": "chat",
}
TOPICS = {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}
CHAT = {"kind": "llm", "model": "zoo/tiny-llama"}
SERVICES = {
    "topics": TOPICS,
    "search": {**TOPICS, "model": "zoo/topics-embedding"},
    "sure": {"kind": "cascade", "levels": ["topics", "large"], "data": "zoo/topics", "accuracy_loss": 0.01},
    "large": {**TOPICS, "model": "zoo/topics-large"},
    "other": CHAT,
}


def read(adapters: Any = "zoo/adapters", **changes: Any) -> RouteConfig:
    services = {"ask": {**ROUTE, **changes}, **SERVICES, "chat": {**CHAT, "adapters": adapters}}
    parsed = kinds.parse({"services": services})
    check_models(parsed)
    return parsed.of(RouteConfig)["ask"]


def problem(**changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    [told] = error.value.problems
    return told


def test_to_language_models_and_adapters() -> None:
    route = read()
    assert route.to == {"strings": "logging-8", "debugger": "other"}
    assert route.parts() == ("topics", "chat")
    assert route.example("ask").path == "v1/chat/completions"


def test_by_a_cascade() -> None:
    assert read(by="sure").by == "sure"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"to": {}}, "services.ask.to: got {}; dictionary should have at least 1 item"),
        ({"by": "topic"}, "services.ask.by: got topic; there is no such service; there are: ask, topics"),
        ({"otherwise": "logging-8"}, "services.ask.otherwise: got logging-8; there is no such service; there are: ask"),
        ({"by": "search"}, "services.ask.by: search does not choose one of several labels; choose one of topics, sure"),
        ({"by": "chat"}, "services.ask.by: chat does not choose one of several labels"),
        ({"by": "ask"}, "services.ask.by: ask does not choose one of several labels"),
        ({"otherwise": "topics"}, "services.ask.otherwise: topics is no language model; choose one of other, chat"),
        ({"otherwise": "ask"}, "services.ask.otherwise: ask is no language model; choose one of other, chat"),
        ({"slo_ms": 10_001}, "services.ask.slo_ms: got 10001; chat, off whose slo_ms it is taken, has 10000; lower it"),
        ({"to": {"string": "chat"}}, "services.ask.to.string: topics has no such label; it has data model, compound"),
        (
            {"to": {"strings": "logging-9"}},
            "services.ask.to.strings: got logging-9, no language model or adapter; there are: other, chat, logging-8",
        ),
        ({"to": {"strings": "ask"}}, "services.ask.to.strings: got ask, no language model or adapter"),
        ({"to": {"strings": "topics"}}, "services.ask.to.strings: got topics, no language model or adapter"),
        ({"adapters": None}, "services.ask.to.strings: got logging-8, no language model or adapter"),
    ],
)
def test_each_mistake_is_told_in_one_line(changes: dict[str, Any], line: str) -> None:
    assert problem(**changes).startswith(line)


def test_adapters_that_come_later_are_taken_where_there_is_a_folder_for_them(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    later = {"strings": "later"}
    assert read({"folder": str(tmp_path)}, to={"strings": "mine"}).to == {"strings": "mine"}
    assert "there are: other, chat, mine" in problem(adapters={"folder": str(tmp_path)}, to=later)
    assert read({"roots": [str(tmp_path)]}, to=later).to == later
    assert "got topics" in problem(adapters={"roots": [str(tmp_path)]}, to={"strings": "topics"})
