"""A record holds what was acknowledged last, whoever else writes, fails or is killed in whatever step."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stored_files import Fault, FaultyStorage, Interleaved, MemoryStorage

from pliant.deployments.serving.state.record import Record, StateError, SupersededError, UncertainError
from pliant.deployments.serving.state.storage import FolderStorage, Storage, UrlStorage

NAME = "registries/chat"


def memory_url() -> UrlStorage:
    return UrlStorage(f"memory://{uuid.uuid4().hex}/state")


@pytest.fixture(params=["folder", "file URL", "memory URL"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made: dict[str, Callable[[], Storage]] = {
        "folder": lambda: FolderStorage(tmp_path),
        "file URL": lambda: UrlStorage(f"file://{tmp_path}"),
        "memory URL": memory_url,
    }
    return made[request.param]()


def test_what_is_written_is_read_by_who_comes_next(storage: Storage) -> None:
    record = Record(storage, NAME)
    assert record.claim() == (b"", ())
    for content in (b"", b"one", b"two\n\x00", b"three", b"four"):
        record.write(content)
        assert Record(storage, NAME).claim() == (content, ())
        record.claim()
    assert len(storage.names("registries")) <= 4, "three contents and the claim"


def test_names_do_not_get_in_each_other_s_way(storage: Storage) -> None:
    names = ("registries/chat", "registries/chat.000001", "registries/chat-2", "tasks/chat")
    for name in names:
        record = Record(storage, name)
        assert record.claim().content == b""
        record.write(name.encode())
    assert [Record(storage, name).claim().content for name in names] == [name.encode() for name in names]


def test_an_old_planner_cannot_write_over_the_new_one_s(storage: Storage) -> None:
    old, new = Record(storage, NAME), Record(storage, NAME)
    old.claim()
    old.write(b"old")
    assert new.claim().content == b"old"
    with pytest.raises(SupersededError, match="another planner has taken over the state registries/chat"):
        old.write(b"lost")
    for number in range(10):
        new.write(b"new %d" % number)
    for _ in range(2):
        with pytest.raises(SupersededError):
            old.write(b"lost")
    assert Record(storage, NAME).claim() == (b"new 9", ())


def test_one_that_was_away_so_long_that_its_next_generation_has_come_and_gone(storage: Storage) -> None:
    old, new = Record(storage, NAME), Record(storage, NAME)
    old.claim()
    new.claim()
    for number in range(10):
        new.write(b"new %d" % number)
    with pytest.raises(SupersededError):
        old.write(b"lost")
    new.write(b"more")
    assert Record(storage, NAME).claim() == (b"more", ())


@pytest.mark.parametrize("how", ["cut", "empty", "flipped", "header"])
def test_a_damaged_generation_is_put_aside_and_the_one_before_is_used(tmp_path: Path, how: str) -> None:
    record = Record(FolderStorage(tmp_path), NAME)
    record.claim()
    record.write(b"good")
    record.write(b"newest")
    newest = max((tmp_path / "registries").iterdir())
    whole = newest.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    newest.write_bytes(
        {"cut": whole[:-3], "empty": b"", "flipped": flipped, "header": whole.replace(b'"epoch": 1', b'"epoch": 7')}[
            how
        ]
    )
    content, [problem] = Record(FolderStorage(tmp_path), NAME).claim()
    assert content == b"good"
    assert str(problem).startswith("registries/chat.000004 is damaged (its checksum is wrong)")
    assert str(problem).endswith("it is now registries/chat.000004.broken; generation 3 is used")
    assert (tmp_path / "registries" / "chat.000004.broken").exists()
    assert Record(FolderStorage(tmp_path), NAME).claim() == (b"good", ())


def test_when_all_is_damaged_it_is_said_and_begins_anew(tmp_path: Path) -> None:
    record = Record(FolderStorage(tmp_path), NAME)
    record.claim()
    record.write(b"only")
    for file in (tmp_path / "registries").iterdir():
        file.write_bytes(b"?")
    found = Record(FolderStorage(tmp_path), NAME).claim()
    assert found.content == b""
    assert str(found.problems[0]).endswith("; nothing before it is left")


def test_what_cannot_be_claimed_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(FolderStorage(tmp_path), NAME)
    record.claim()
    record.write(b"one")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    late = Record(FolderStorage(tmp_path), NAME)
    with pytest.raises(StateError, match="cannot be read, or not be written: No space left on device"):
        late.claim()
    assert late.look() == b"one"
    monkeypatch.undo()
    record.write(b"two")


def test_what_a_newer_version_wrote_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.deployments.serving.state.record._FORMAT", 2)
    record = Record(FolderStorage(tmp_path), NAME)
    record.claim()
    record.write(b"of the future")
    monkeypatch.undo()
    with pytest.raises(StateError, match=r"written by a newer pliant \(format 2\), so it is neither used nor written"):
        Record(FolderStorage(tmp_path), NAME).claim()
    record.write(b"more of it")


@pytest.mark.parametrize("fault", ["before", "after", "torn"])
@pytest.mark.parametrize("step", range(4))
def test_a_write_that_failed_is_followed_by_one_that_holds(step: int, fault: Fault) -> None:
    """Whether the storage did what it said it did not do, or the half of it."""
    files = MemoryStorage()
    coming: list[Fault] = []
    record = Record(FaultyStorage(files, lambda: coming.pop(0) if coming else ""), NAME)
    record.claim()
    record.write(b"one")
    coming += ["", "", "", fault][3 - step :]
    try:
        record.write(b"two")
        expected = {b"two"}
    except UncertainError:
        expected = {b"one", b"two"}
    except StateError:
        expected = {b"one"}
    coming.clear()
    assert Record(files, NAME).look() in expected
    record.write(b"three")
    assert Record(files, NAME).claim().content == b"three"


class Log:
    """What planners were told, one after another; complains when something acknowledged is not there."""

    def __init__(self) -> None:
        self.owner: int | None = None
        self.known = [b""]
        """What was acknowledged, or found by a claim, in order."""
        self.unsure: set[bytes] = set()
        """Begun by the owner and not acknowledged."""

    def claimed(self, planner: int, content: bytes) -> None:
        assert content in {self.known[-1], *self.unsure}, "lost, or come back from the past"
        self.owner = planner
        self.unsure.clear()
        self.known.append(content)

    def writes(self, planner: int, content: bytes) -> None:
        if self.owner == planner:
            self.unsure.add(content)

    def wrote(self, planner: int, content: bytes) -> None:
        if self.owner == planner:
            self.unsure.remove(content)
            self.known.append(content)
        else:
            assert content in self.known, "one that was cut off has written what its successor did not find"


faults = st.sampled_from(["", "", "", "", "before", "after", "torn"])
turns = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), faults), max_size=30)
"""Whose, how many steps, and what becomes of the last one."""


@settings(max_examples=200)
@given(turns)
def test_acknowledged_means_durable_however_three_planners_overlap_and_whatever_fails(
    schedule: list[tuple[int, int, Fault]],
) -> None:
    """Each claims and writes, again and again; the others come between any two of its steps."""
    files, log = MemoryStorage(), Log()

    def planner(index: int) -> Callable[[Callable[[], Fault]], None]:
        def run(step: Callable[[], Fault]) -> None:
            storage = FaultyStorage(files, step)
            for life in range(3):
                record = Record(storage, NAME)
                try:
                    log.claimed(index, record.claim().content)
                except StateError:
                    continue
                for number in range(3):
                    content = f"{index} {life} {number}".encode()
                    log.writes(index, content)
                    try:
                        record.write(content)
                    except SupersededError:
                        break
                    except StateError:
                        continue
                    log.wrote(index, content)

        return run

    overlapping = Interleaved([planner(index) for index in range(3)])
    for index, steps, fault in schedule:
        for _ in range(steps - 1):
            overlapping.turn(index)
        overlapping.turn(index, fault)
    overlapping.finish()
    log.claimed(9, Record(files, NAME).claim().content)


def killed_at(step: int, folder: Path) -> bool:
    """Write "new" in a process that ends before its `step`th call of the system; whether it was acknowledged."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            os._exit(9)

    fsync = os.fsync
    record = Record(FolderStorage(folder), NAME)
    record.claim()
    os.fsync = lambda opened: (count(), fsync(opened))[1]  # type: ignore[assignment]
    sys.addaudithook(lambda event, _: count() if event == "open" or event.startswith("os.") else None)
    record.write(b"new")
    os._exit(0)


def test_a_planner_that_is_killed_in_any_step_of_a_write_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = set()
    step, acknowledged = 0, False
    while not acknowledged:
        step += 1
        folder = tmp_path / str(step)
        folder.mkdir()
        first = Record(FolderStorage(folder), NAME)
        first.claim()
        first.write(b"old")
        acknowledged = killed_at(step, folder)
        content, problems = Record(FolderStorage(folder), NAME).claim()
        assert problems == ()
        assert content == b"new" if acknowledged else content in (b"old", b"new")
        seen.add(content)
    assert seen == {b"old", b"new"}
    assert step > 8, "draft, sync, link, unlink, sync, list, tidy"


def test_a_file_is_synced_before_it_is_seen_and_its_folder_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("fsync", "link"):
        call = getattr(os, name)

        def noted(*args: Any, name: str = name, call: Any = call) -> None:
            call(*args)
            folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}")
            done.append("sync folder" if folder else name)

        monkeypatch.setattr(os, name, noted)
    FolderStorage(tmp_path).create("deep/file", b"x")
    assert done == ["sync folder", "fsync", "link", "sync folder"]


def test_where_there_are_no_hard_links_files_are_created_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    storage = FolderStorage(tmp_path)
    storage.create("file", b"x")
    with pytest.raises(FileExistsError):
        storage.create("file", b"y")
    assert storage.read("file") == b"x"
    assert storage.names("") == ["file"]


def test_a_share_that_is_not_mounted_is_not_written_beside(tmp_path: Path) -> None:
    away = FolderStorage(tmp_path / "share")
    with pytest.raises(StateError, match=r"cannot be read: .*share is no folder; make it, or mount the share"):
        Record(away, NAME).claim()
    assert not (tmp_path / "share").exists()


@pytest.mark.parametrize("error", [OSError(22, "Precondition failed"), RuntimeError("409 Conflict")])
def test_a_storage_that_refuses_to_overwrite_in_words_of_its_own_will_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    storage = memory_url()
    pipe_file = MemoryFileSystem.pipe_file

    def refusing(*args: Any, **options: Any) -> None:
        try:
            pipe_file(*args, **options)
        except FileExistsError:
            raise error from None

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refusing)
    old, new = Record(storage, NAME), Record(storage, NAME)
    old.claim()
    old.write(b"old")
    assert new.claim().content == b"old"
    with pytest.raises(SupersededError):
        old.write(b"late")
    new.write(b"new")
    assert Record(storage, NAME).claim().content == b"new"


def test_a_storage_that_overwrites_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    write = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda self, path, value, mode: write(self, path, value))
    with pytest.raises(StateError, match="overwrites what it was asked to create; choose a storage that refuses"):
        Record(memory_url(), NAME).claim()


def test_errors_of_clients_of_object_storages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def ls(*_: Any, **__: Any) -> None:
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    with pytest.raises(StateError, match="cannot be read: RuntimeError: 403 Forbidden"):
        Record(memory_url(), NAME).claim()
