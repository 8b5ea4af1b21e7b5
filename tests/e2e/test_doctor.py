"""`pliant doctor` beside a Ray of two nodes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PROCESS_HANGS_AFTER_S

from e2e.cluster import ROOT, with_tests
from pliant import ray_settings
from pliant.bench.ray_session import running, script

NODES = """
import os, subprocess, sys
from pliant.bench.chaos.nodes import Nodes

nodes = Nodes(head_cpus=0, num_cpus=1)
nodes.add()
try:
    with open(sys.argv[1], "w") as out:
        done = subprocess.run(sys.argv[2:], stdout=out, env={**os.environ, "RAY_ADDRESS": nodes.cluster.address})
        print("exit status", done.returncode)
finally:
    nodes.cluster.shutdown()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What doctor finds, by check."""
    report = tmp_path_factory.mktemp("doctor") / "report.json"
    command = [script("pliant"), "doctor", str(ROOT / "cluster.yaml"), "--json"]
    settings = {**ray_settings.ENVIRONMENT, **with_tests(), "RAY_AUTH_MODE": "disabled"}
    with (
        tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as ray_folder,
        running([sys.executable, "-c", NODES, str(report), *command], Path(ray_folder), settings) as started,
    ):
        assert started.process.wait(PROCESS_HANGS_AFTER_S) == 0, started.tail()
        assert "exit status 1" in started.tail(), "there is no token"
    return {each["check"]: each for each in json.loads(report.read_text())}


def test_each_node_is_looked_at(found: dict[str, Any]) -> None:
    assert found["nodes"]["says"] == "Ray runs on 2 nodes, and all answer"
    assert "on all 2 nodes" in found["c compiler"]["says"]
    assert "there are" in found["memory"]["says"]


def test_nodes_are_compared(found: dict[str, Any]) -> None:
    assert "ray 2." in found["versions"]["says"]
    assert found["clocks"]["level"] == "ok"


def test_a_ray_without_a_token_is_a_problem(found: dict[str, Any]) -> None:
    assert found["token"]["level"] == "problem"
