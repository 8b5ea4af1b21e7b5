"""What is made once is made by one process; others hear how far it is, and find it whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pliant.cache import made, made_once, shared


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
    assert sorted(path.name for path in (tmp_path / "thing").iterdir()) == [".made.json", "file"]


def test_what_an_interrupted_process_left_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "thing.unfinished").mkdir()
    (tmp_path / "thing.unfinished" / "half").write_text("")
    (tmp_path / "thing.progress").write_text('["lear')
    made_once(tmp_path / "thing", lambda into: (into / "file").write_text("whole") and None, lambda *_: None)
    assert sorted(path.name for path in (tmp_path / "thing").iterdir()) == [".made.json", "file"]
    assert not (tmp_path / "thing.progress").exists()


SMALL, LARGE = b'{"0": 0.9}', bytes(2**20 + 1)


def two_files(into: Path) -> None:
    (into / "deep").mkdir()
    (into / "deep" / "small").write_bytes(SMALL)
    (into / "large").write_bytes(LARGE)


def flip(file: Path) -> None:
    file.write_bytes(b"?" + file.read_bytes()[1:])


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "emptied by a power cut": ("deep/small", lambda file: file.write_bytes(b"")),
    "flipped": ("deep/small", flip),
    "gone": ("deep/small", Path.unlink),
    "large and cut": ("large", lambda file: file.write_bytes(LARGE[:-1])),
    "without a manifest that can be read": (".made.json", lambda file: file.write_bytes(b"")),
    "with a manifest of something else": (".made.json", lambda file: file.write_bytes(b"[]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = made_once(tmp_path / "thing", two_files)
    assert made(folder)
    name, spoil = DAMAGES[damage]
    spoil(folder / name)
    assert not made(folder)
    made_once(folder, two_files)
    assert ((folder / "deep" / "small").read_bytes(), (folder / "large").read_bytes()) == (SMALL, LARGE)
    assert made(folder)
    assert "thing is damaged, and was made again" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thing", "thing.lock"]


@pytest.mark.parametrize(("content", "whole"), [(SMALL, True), (b"", False)])
def test_what_earlier_versions_made_has_no_empty_file(tmp_path: Path, content: bytes, whole: bool) -> None:
    (tmp_path / "file").write_bytes(content)
    assert made(tmp_path) == whole


def test_what_others_add_does_not_matter(tmp_path: Path) -> None:
    folder = made_once(tmp_path / "thing", two_files)
    (folder / "more").touch()
    assert made(folder)


def test_what_is_made_of_links_to_another_leaves_that_whole(tmp_path: Path) -> None:
    folder = made_once(tmp_path / "thing", two_files)

    def link(into: Path) -> None:
        for file in folder.iterdir():
            (into / file.name).symlink_to(file)
        (into / "more").write_text("more")

    linked = made_once(tmp_path / "linked", link)
    assert made(folder)
    assert made(linked)


def test_what_is_damaged_stays_until_it_can_be_made_again(tmp_path: Path) -> None:
    folder = made_once(tmp_path / "thing", two_files)
    (folder / "deep" / "small").unlink()

    def fail(_: Path) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once(folder, fail)
    assert (folder / "large").exists()


def test_all_of_it_is_synced_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def noted(opened: int) -> None:
        fsync(opened)
        synced.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)

    monkeypatch.setattr(os, "fsync", noted)
    made_once(tmp_path / "thing", two_files)
    assert sorted(synced[:-2]) == [".made.json", "deep", "large", "small"]
    assert synced[-2:] == ["thing.unfinished", tmp_path.name]
