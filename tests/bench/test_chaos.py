"""What the chaos bench does to processes, and which of its cells it tries."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from pliant.bench.chaos import compare, faults, slow_disk
from pliant.bench.chaos.plan import IMPOSSIBLE, Cell
from pliant.bench.load import LoadError
from pliant.bench.report import Options

_VICTIM = """
import sys

while line := sys.stdin.readline():
    try:
        if line == "memory\\n":
            bytearray(256 * 2**20)
        else:
            with open(sys.argv[1], "w") as file:
                file.write("x")
    except (MemoryError, OSError) as error:
        print(type(error).__name__, flush=True)
    else:
        print("ok", flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "does", "fails"), [("out of memory", "memory", "MemoryError"), ("full disk", "disk", "OSError")]
)
def test_a_process_gets_no_more_until_that_is_undone(fault: str, does: str, fails: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _VICTIM, str(tmp_path / "written")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:

        def said() -> str:
            assert victim.stdin
            assert victim.stdout
            victim.stdin.write(f"{does}\n")
            victim.stdin.flush()
            return victim.stdout.readline().strip()

        process = psutil.Process(victim.pid)
        assert said() == "ok"
        faults.FAULTS[fault](process, [])
        assert said() == fails
        faults.undo(process)
        assert said() == "ok"
        victim.kill()


def test_connections_with_peers_are_cut_and_no_others() -> None:
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print(s.recv(1))"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-c", code, str(listening.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            connection, _ = listening.accept()
            process = psutil.Process(victim.pid)
            with connection:
                assert faults.cut(process, []) == 0
                assert faults.cut(process, [psutil.Process()]) == 1
                assert connection.recv(1) == b""
            assert victim.communicate()[0].strip() == "b''"


def _found(part: str, fault: str) -> dict[str, Any]:
    lost = int(Cell(part, fault) in IMPOSSIBLE)
    return {"part": part, "fault": fault, "sent": 1, "lost": lost, "wrong": 0, "late": 0, "recover_s": 20.0 * lost}


def _figures(tmp_path: Path, cells: list[str]) -> dict[str, float]:
    given = Options(False, None, "cpu", tmp_path, cells)
    return {figure.name: figure.value for figure in compare.run(given).figures}


def test_only_cells_that_there_are_can_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Cell] = []

    def found(plan: list[Cell]) -> list[dict[str, Any]]:
        tried.extend(plan)
        return [_found(*cell) for cell in plan]

    monkeypatch.setattr(compare, "_of_one_cluster", found)
    figures = _figures(tmp_path, ["node:SIGKILL", "replica of chat:out of memory", "controller:SIGSTOP"])
    assert sorted(cell.name for cell in tried) == [
        "controller:SIGSTOP",
        "node:SIGKILL",
        "replica of chat:out of memory",
    ]
    assert {"lost", "recover_s_p95", "recover_s_p95_stopped"} <= figures.keys()
    with pytest.raises(LoadError, match=r"no such cells: node:full disk; there are .*node:SIGKILL"):
        _figures(tmp_path, ["node:full disk"])


def test_what_nobody_could_keep_is_shown_and_counts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_of_one_cluster", lambda plan: [_found(*cell) for cell in plan])
    figures = _figures(tmp_path, [*(cell.name for cell in IMPOSSIBLE), "gateway:SIGKILL"])
    assert (figures["lost"], figures["lost_impossible"]) == (0, len(IMPOSSIBLE))
    assert figures["recover_s_p95"] == 0


def test_the_documents_name_what_nobody_could_keep() -> None:
    page = (Path(__file__).parents[2] / "docs" / "fault_tolerance.md").read_text()
    assert set(re.findall(r"^\| `([a-z ]+:[A-Za-z ]+)` \|", page, re.M)) == {cell.name for cell in IMPOSSIBLE}


def test_a_cluster_that_does_not_get_whole_again_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters: list[list[str]] = []

    def found(plan: list[Cell]) -> list[dict[str, Any]]:
        clusters.append([cell.name for cell in plan])
        return [_found(*cell) for cell in plan[:2]]

    monkeypatch.setattr(compare, "_of_one_cluster", found)
    names = ["gateway:SIGKILL", "planner:SIGKILL", "controller:SIGKILL"]
    figures = _figures(tmp_path, names)
    assert clusters == [names, names[2:]]
    assert figures["lost"] == 0


def test_a_slow_disk_is_a_store_that_planners_take(tmp_path: Path) -> None:
    """As another process finds it: by its entry point."""
    slow_disk.plugin(tmp_path)
    code = (
        "import sys, time\n"
        "from pliant.deployments.serving.state.record import Record\n"
        "from pliant.deployments.serving.state.storage import storage\n"
        "from pliant.bench.chaos import slow_disk\n"
        "record = Record(storage('slow://' + sys.argv[1] + '/state'), 'registries/chat')\n"
        "record.claim()\n"
        "slow_disk.begin(0.5)\n"
        "before = time.monotonic()\n"
        "record.write(b'content')\n"
        "assert time.monotonic() - before >= 0.5\n"
        "slow_disk.end()\n"
        "print(record.look().decode())"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    given = {**os.environ, "PYTHONPATH": path, slow_disk.SWITCH: str(tmp_path / "slow")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.stdout.strip() == "content", done.stderr
