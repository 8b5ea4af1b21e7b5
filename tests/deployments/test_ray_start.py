"""A node's agents may take their time: their ports are known before, and whoever starts it waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray._private import services

from pliant.deployments import ray_start
from pliant.deployments.ray_start import patient


def test_ports_are_known_before_agents_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def start(gcs: str, node_id: str, session_dir: str, metrics_agent_port: int | None = None, **ports: int) -> str:
        started.append({**ports, "metrics_agent_port": metrics_agent_port})
        return "the process"

    monkeypatch.setattr(services, "start_raylet", start)
    with patient():
        given = {"dashboard_agent_listen_port": 0, "metrics_agent_port": 2000}
        assert services.start_raylet("gcs", "node", str(tmp_path), **given) == "the process"
    assert services.start_raylet is start
    [ports] = started
    assert ports.keys() == {*ray_start._PORTS}
    assert ports.pop("metrics_agent_port") == 2000
    assert len(set(ports.values())) == 3
    assert all(port in ray_start._ABOVE_OTHERS for port in ports.values())
    [file] = tmp_path.iterdir()
    assert file.name.startswith("dashboard_agent_listen_port")
    assert file.read_text() == str(ports["dashboard_agent_listen_port"])


def test_whoever_starts_a_node_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def ask(*asked_for: str) -> dict[str, str]:
        asked.append(asked_for)
        if len(asked) < 3:
            raise RuntimeError("it has not come")
        return {"node": "there"}

    monkeypatch.setattr(services, "get_node", ask)
    monkeypatch.setattr(ray_start.time, "sleep", lambda _: None)
    with patient():
        assert services.get_node("gcs", "node") == {"node": "there"}
    assert asked == [("gcs", "node")] * 3
