"""`pliant doctor` on this machine, as if no Ray ran."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pliant.cli import command, doctor, doctor_facts
from pliant.cli.doctor_facts import Compiler, Unknown
from pliant.config.cluster import PLANNER_CPUS
from pliant.config.llm import AdaptersConfig
from pliant.deployments import nodes
from pliant.deployments.kinds import read
from pliant.errors import PliantError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor_facts, "ray_runs", lambda: False)
    monkeypatch.setattr(doctor, "_ANSWERS_S", 0.1)  # nobody answers here, however long one waits
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def listener() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path, listener: Any) -> Path:
    """A cluster.yaml whose port this process holds."""
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["http_options"]["port"] = listener.getsockname()[1]
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def diagnosed(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command.app, ["doctor", *map(str, arguments)])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def said(*arguments: object) -> tuple[int, dict[str, Any]]:
    code, output = diagnosed(*arguments, "--json")
    found = json.loads(output)
    assert all(each.keys() == {"check", "level", "says", "fix"} for each in found)
    return code, {each["check"]: each for each in reversed(found)}


def test_a_port_that_another_program_holds_is_a_problem(file: Path, listener: Any) -> None:
    listener.settimeout(0)
    code, output = diagnosed(file)
    assert code == 1
    assert f"is held by {Path('/proc/self/comm').read_text().strip()} (process {os.getpid()})" in output
    assert "→ stop it, or choose another port" in output


def test_this_machine_is_looked_at_without_a_cluster(file: Path, listener: Any) -> None:
    listener.close()
    _, found = said(file)
    assert found["nodes"]["says"].startswith("Ray does not run here")
    assert found["cluster"]["says"].startswith("nothing answers at")
    assert "python 3." in found["versions"]["says"]
    assert found["cache"]["level"] in ("ok", "warning", "problem")
    assert not any("cannot be looked at" in each["says"] for each in found.values()), found


def test_an_address_that_is_named_must_answer(file: Path, listener: Any) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    _, found = said(file, "--url", url)
    assert found["cluster"]["level"] == "warning"
    assert url in found["cluster"]["says"]


def test_a_file_that_is_wrong_says_each_mistake_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text((ROOT / "cluster.yaml").read_text().replace("slo_ms:", "slo:"))
    code, found = said(path)
    assert code == 1
    assert "topics.slo" in found["file"]["says"]
    assert "search.slo" in found["file"]["says"]
    assert "memory" not in found
    assert "cache" in found


def test_a_ray_that_cannot_be_reached_leaves_this_machine(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_look: object) -> list[Any]:
        raise PliantError("no token")

    monkeypatch.setattr(doctor_facts, "ray_runs", lambda: True)
    monkeypatch.setattr(nodes, "visit", refuse)
    _, found = said(file)
    assert found["nodes"]["level"] == "warning"
    assert "no token" in found["nodes"]["says"]
    assert "c compiler" in found


def test_what_nodes_say_is_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visits = [nodes.Visit("a", doctor_facts.machine(), True, 0.0, 0.1), nodes.Unreached("b", "no pliant")]
    monkeypatch.setattr(doctor_facts, "ray_runs", lambda: True)
    monkeypatch.setattr(nodes, "visit", lambda _look: visits)
    _, found = said(file)
    assert "b (no pliant)" in found["nodes"]["says"]
    assert found["token"]["level"] == "ok"


def test_whatever_a_look_raises_becomes_its_reason() -> None:
    assert doctor_facts.known(lambda: int("x\ny")) == Unknown("invalid literal for int() with base 10: 'x\\ny'")
    assert doctor_facts.known(lambda: [][0]) == Unknown("list index out of range")


def test_the_file_wants_what_its_fewest_replicas_and_their_memory_take() -> None:
    cluster = read(ROOT / "cluster.yaml")
    wants = doctor_facts.wants(cluster)
    services = [(each, size.min) for each in cluster.serving.services.values() if (size := each.replica_range())]
    assert wants.gpus == 0
    reserved = sum(least * each.resources()["num_cpus"] for each, least in services)
    assert wants.cpus == pytest.approx(cluster.serving.gateway.cpus + reserved + PLANNER_CPUS)
    chat = cluster.serving.services["chat"]
    assert chat.memory_bytes() > 256 * 2**20
    kept = chat.model_copy(update={"adapters": AdaptersConfig(folder="zoo/adapters", host_mb=7)})
    assert kept.memory_bytes() == chat.memory_bytes() + 7 * 2**20
    assert kept.model_copy(update={"gpus": 1}).memory_bytes() == 7 * 2**20
    assert wants.memory_bytes > 2 * chat.memory_bytes() + 2e9


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a compiler")
def test_a_compiler_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: out of order' >&2; exit 3\n")
    broken.chmod(0o755)
    assert isinstance(doctor_facts.machine().c_compiler, Compiler)
    monkeypatch.setenv("CC", str(broken))
    assert doctor_facts.machine().c_compiler == Compiler(str(broken), "cc: out of order")


def test_a_cache_folder_that_cannot_be_is_a_problem(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "occupied" / "cache"))
    code, found = said(file)
    assert code == 1
    assert "cannot be written" in found["cache"]["says"]
