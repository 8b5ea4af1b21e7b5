"""A node's agents may take their time: their ports are known before, and whoever starts it waits."""

from __future__ import annotations

import socket
import subprocess
import sys
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


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """To nodes that start one after the other, before their agents listen, also by other processes."""
    monkeypatch.setattr(ray_start, "_given", [])
    first, *_, last = ray_start._free(24)
    ray_start._given.pop().close()
    monkeypatch.setattr(ray_start, "_ABOVE_OTHERS", range(first, last + 2))
    ports = f"range({first}, {last + 2})"
    ask = f"from pliant.deployments import ray_start; ray_start._ABOVE_OTHERS = {ports}; print(ray_start._free(4))"
    found = [ray_start._free(4) for _ in range(5)]
    assert len({port for ports in found for port in ports}) == 20
    [left] = {*range(first, last, 4)} - {ports[0] for ports in found}
    with socket.create_server(("127.0.0.1", left + 1)), pytest.raises(OSError, match="no 4 ports in a row"):
        ray_start._free(4)
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert done.stdout == f"{[*range(left, left + 4)]}\n", done.stderr
    for mark in ray_start._given:
        mark.close()


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
