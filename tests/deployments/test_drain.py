"""A node that is to be drained, of a Ray whose head does not answer. Of one that does: e2e/test_nodes.py."""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pliant.cli import command
from pliant.deployments import drain
from pliant.errors import PliantError


def test_a_head_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(drain, "_REACHED_WITHIN_S", 0.1)
        done = CliRunner().invoke(command.app, ["drain", "--within-s", "1"])
    assert isinstance(done.exception, PliantError)
    assert "not drained: no answer within 1.1 s; see whether `ray status` answers" in str(done.exception)


@pytest.mark.parametrize("accepted", [True, False])
def test_ray_hears_when_the_node_goes(accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def drain_node(*request: object) -> tuple[bool, str]:
        asked.extend(request)
        return accepted, "" if accepted else "it is dead"

    monkeypatch.setattr(drain, "GcsClient", lambda address: SimpleNamespace(drain_node=drain_node))
    monkeypatch.setattr(drain.time, "time_ns", lambda: 5_000_000)
    with contextlib.nullcontext() if accepted else pytest.raises(PliantError, match="does not drain node: it is dead"):
        drain.announce("127.0.0.1:1", "node", 60.0)
    assert asked == ["node", 2, "pliant drain", 60_005]


def test_the_time_that_ray_takes_to_hear_of_it_is_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def hear(*_: object) -> None:
        now[0] += 60

    def look() -> dict[str, str]:
        now[0] += 1
        return {"replica": "here"}

    context = SimpleNamespace(get_node_id=lambda: "here", gcs_address="ray")
    monkeypatch.setattr(drain.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    monkeypatch.setattr(drain, "announce", hear)
    monkeypatch.setattr(drain, "replicas", look)
    assert drain._drain(90.0) == 1
    assert now[0] == 90
