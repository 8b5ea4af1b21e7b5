"""`pliant top` against a small server that answers /stats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.answering import answering

from pliant.cli import top
from pliant.cli.terminal import console
from pliant.errors import PliantError

STATS: dict[str, Any] = {
    "gateway": "gw-1",
    "planner_reached": True,
    "services": {
        "topics": {
            "kind": "encoder",
            "ready": True,
            "state": "ready, 1 of 1 replicas",
            "requests": {"ok": 10, "shed": 2},
            "requests_by_gateway": {"g": {"ok": 10, "shed": 2}},
            "plan": {},
            "replicas": {"r1": {"max_length": 512, "served": 10, "waiting": 0, "service_s": 0.01, "home": 64}},
        },
        "chat": {
            "kind": "llm",
            "ready": False,
            "state": "loading, 0 of 1 replicas",
            "requests": {},
            "requests_by_gateway": {},
            "plan": {},
            "replicas": {},
            "problems": ["sql: damaged"],
        },
    },
}


def shown(service: str | None) -> str:
    with answering(200, json.dumps(STATS).encode()) as url, console.capture() as capture:
        top.watch(url, service, rounds=1)
    return capture.get()


def test_all_services_and_what_is_wrong() -> None:
    text = shown(None)
    assert "gw-1" in text
    assert "chat is not ready: loading, 0 of 1 replicas; sql: damaged" in text
    assert "topics" in text
    assert "encoder" in text


def test_one_service_shows_the_panels_of_its_kind() -> None:
    text = shown("topics")
    assert "Requests per second" in text
    assert "r1" in text


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"", "PLIANT_API_KEY"),
        (500, b"", "cannot be read"),
        (200, b"what?", "not pliant"),
        (200, b"[]", "not pliant"),
    ],
)
def test_what_does_not_answer_is_said(status: int, body: bytes, said: str) -> None:
    with answering(status, body) as url, pytest.raises(PliantError, match=said):
        top.watch(url, None, rounds=1)


def test_an_unknown_service_is_said() -> None:
    with pytest.raises(PliantError, match="no service chad; there are: topics, chat"):
        shown("chad")


def test_a_service_that_went_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    later = {**STATS, "services": {"chat": STATS["services"]["chat"]}}
    looks = iter([STATS, later])
    monkeypatch.setattr(top, "ask", lambda *_: next(looks))
    monkeypatch.setattr(top, "STEP_S", 0.0)
    with console.capture(), pytest.raises(PliantError, match="no service topics; there are: chat"):
        top.watch("http://pliant", "topics", rounds=2)


def test_a_line_is_as_high_as_its_highest_value() -> None:
    assert top.line([0, 1, 2]) == " ▄█"
    assert top.line([0, 0]) == "  "
    assert top.line([]) == ""
