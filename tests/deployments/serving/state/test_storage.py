"""Files that are created once, whole, or not at all."""

from __future__ import annotations

import errno
import os
from itertools import count
from pathlib import Path

import pytest

from pliant.deployments.serving.state import storage
from pliant.deployments.serving.state.storage import FolderStorage


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStorage:
    def link(draft: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not request.param:
        monkeypatch.setattr(os, "link", link)
    return FolderStorage(tmp_path)


def test_a_file_is_created_once(folder: FolderStorage) -> None:
    folder.create("a/b", b"first")
    with pytest.raises(FileExistsError):
        folder.create("a/b", b"second")
    assert folder.read("a/b") == b"first"
    assert folder.names("a") == ["b"]


@pytest.mark.parametrize(("folder", "room"), [(True, 0), (False, 0), (False, 1)], indirect=["folder"])
def test_a_full_disk_leaves_no_half_of_a_file(
    folder: FolderStorage, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    write = storage._write
    writes = count()

    def full(file: Path, content: bytes) -> None:
        if next(writes) < room:
            write(file, content)
            return
        file.write_bytes(content[:2])
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "_write", full)
        with pytest.raises(OSError, match="full"):
            folder.create("a/b", b"content")
    assert folder.names("a") == []
    folder.create("a/b", b"content")
    assert folder.read("a/b") == b"content"
