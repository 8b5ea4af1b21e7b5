"""Training runs in a process of its own: it tells how far it is, and says in one line why it failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pliant.errors import ModelError
from pliant.zoo import training_process
from pliant.zoo.training_process import train_apart

SCRIPT = """
import json, sys
name, into, niceness = sys.argv[1:]
for done in (0.25, 1.0):
    print(json.dumps({"text": f"learning {name}", "done": done}), flush=True)
open(into + "/trained", "w").write(niceness)
"""


def command(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(training_process, "COMMAND", (sys.executable, "-c", script))


def test_it_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(monkeypatch, SCRIPT)
    heard: list[tuple[str, float]] = []
    train_apart("m", tmp_path, lambda text, done: heard.append((text, done)), 5)
    assert heard == [("learning m", 0.25), ("learning m", 1.0)]
    assert (tmp_path / "trained").read_text() == "5"


def test_a_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(monkeypatch, "import sys; sys.exit('a traceback\\nno space left')")
    with pytest.raises(ModelError, match="zoo/m: training failed: no space left"):
        train_apart("m", tmp_path, lambda *_: None, 0)


def test_a_killed_process_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ModelError, match="ended by signal 9"):
        train_apart("m", tmp_path, lambda *_: None, 0)
