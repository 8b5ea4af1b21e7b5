"""What is made once is made by one process; others hear how far it is, and find it whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pliant.cache import made_once, shared


def test_others_wait_and_hear_how_far_it_is(tmp_path: Path) -> None:
    folder, made = tmp_path / "thing", list[str]()
    begun, finish = threading.Event(), threading.Event()

    def make(into: Path) -> None:
        made.append("once")
        shared(folder, None)("learning", 0.4)
        begun.set()
        finish.wait()
        (into / "file").write_text("whole")

    maker = threading.Thread(target=made_once, args=(folder, make))
    maker.start()
    begun.wait()
    heard: list[tuple[str, float]] = []

    def hear(text: str, done: float) -> None:
        heard.append((text, done))
        finish.set()

    assert made_once(folder, make, hear) == folder
    maker.join()
    assert heard[0] == ("learning", 0.4)
    assert (made, (folder / "file").read_text()) == (["once"], "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]


def test_the_maker_hears_itself(tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    report = shared(tmp_path / "thing", lambda text, done: heard.append((text, done)))
    report("a", 0.1)
    report("b", 0.2)
    assert heard == [("a", 0.1), ("b", 0.2)]


def test_what_failed_is_made_anew(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").write_text("")
        shared(tmp_path / "thing", None)("failing", 0.5)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once(tmp_path / "thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["thing.lock"]
    made_once(tmp_path / "thing", lambda into: (into / "file").write_text("whole") and None)
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["file"]


def test_what_an_interrupted_process_left_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "thing.unfinished").mkdir()
    (tmp_path / "thing.unfinished" / "half").write_text("")
    (tmp_path / "thing.progress").write_text('["lear')
    made_once(tmp_path / "thing", lambda into: (into / "file").write_text("whole") and None, lambda *_: None)
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["file"]
    assert not (tmp_path / "thing.progress").exists()
